"""Byte-pair encoding as sentencepiece trains it, from the tokenizer.json of a published checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, TypedDict

from nightshift.errors import DataError
from nightshift.policies.checkpoint_files import as_object, read_object

SPACE_PIECE = "\u2581"
"""What sentencepiece writes for a space."""


class TokenizerSpec(TypedDict):
    vocabulary: dict[str, int]
    merges: list[str]


class BytePairEncoding:
    """Merges of neighbouring pieces in the order of their rank; what has no piece becomes bytes."""

    def __init__(self, spec: TokenizerSpec) -> None:
        self._ids = spec["vocabulary"]
        self._ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(spec["merges"])}

    def __call__(self, text: str) -> list[int]:
        return [token for piece in self._pieces(text.replace(" ", SPACE_PIECE)) for token in self._tokens(piece)]

    def _pieces(self, text: str) -> list[str]:
        pieces, worst = list(text), len(self._ranks)
        while len(pieces) > 1:
            ranks = [self._ranks.get(pair, worst) for pair in pairwise(pieces)]
            best = min(ranks)
            if best == worst:
                break
            at = ranks.index(best)
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
        return pieces

    def _tokens(self, piece: str) -> list[int]:
        if piece in self._ids:
            return [self._ids[piece]]
        return [self._ids[_byte(byte)] for byte in piece.encode()]


def read(path: Path, rows: int, next_step: str) -> TokenizerSpec:
    """From a tokenizer.json; DataError unless its ids are those of `rows` embeddings."""
    if not path.exists():
        raise DataError(f"{path.parent} has no {path.name}, which the checkpoint's prompts are made with", next_step)
    model = as_object(read_object(path, next_step).get("model"), f"model in {path}", next_step)
    why = _why_not(model, rows)
    if why is not None:
        raise DataError(f"{path} is not the tokenizer of the checkpoint: {why}", next_step)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {"vocabulary": dict(model["vocab"]), "merges": merges}


def require_ids(tokenizer: TokenizerSpec, expected: Mapping[str, int], otherwise: str, next_step: str) -> None:
    """DataError with the sentence `otherwise`: a prompt would begin or end with another token."""
    for piece, number in expected.items():
        found = tokenizer["vocabulary"].get(piece)
        if found != number:
            raise DataError(f"{otherwise}: the id of {piece!r} is {found}, and {number} is expected", next_step)


def _why_not(model: Mapping[str, Any], rows: int) -> str | None:
    """Why prompts cannot be made with the field `model` of a tokenizer.json."""
    vocabulary, merges = model.get("vocab"), model.get("merges")
    if not isinstance(vocabulary, Mapping) or not isinstance(merges, list):
        return "it has no model.vocab with an id per piece, or no list model.merges"
    strange = next((merge for merge in merges if not _is_merge(merge)), None)
    if strange is not None:
        return f"its model.merges has {strange!r}, and pairs of pieces are expected"
    missing = next((piece for piece in map(_byte, range(256)) if piece not in vocabulary), None)
    if missing is not None:
        return f"its model.vocab has no {missing}, and what has no piece becomes bytes"
    beyond = next(
        (piece for piece, found in vocabulary.items() if type(found) is not int or not 0 <= found < rows), None
    )
    if beyond is not None:
        return f"the id of {beyond!r} is {vocabulary[beyond]!r}, and the checkpoint has {rows} embeddings"
    return None


def _is_merge(found: Any) -> bool:
    return isinstance(found, str) or (isinstance(found, list) and all(isinstance(piece, str) for piece in found))


def _byte(value: int) -> str:
    """The piece of a byte."""
    return f"<0x{value:02X}>"
