"""The prompt as token ids: with the tokenizer of a checkpoint, or by hashing words where there is none."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nightshift.errors import ConfigError, DataError
from nightshift.policies.checkpoint_files import as_object, read_object
from nightshift.policies.openvla_oft.network import BOS, FIRST_ACTION_TOKEN, PAD, STOP, VOCABULARY

SPACE = 29871
"""The token of a lone space. The prompt ends with it, and the first action is read from it."""
PROMPT = "In: What action should the robot take to {}?\nOut:"
_RESERVED = 3
"""Unknown, BOS and stop come first in Llama's vocabulary."""
_META = "\u2581"
"""What sentencepiece writes for a space."""
_COPY = "copy it from the checkpoint that this one was trained from"
_WORD = re.compile(r"\w+")


class TokenizerSpec(TypedDict):
    """Byte-pair encoding of Llama 2."""

    vocabulary: dict[str, int]
    merges: list[str]


class Tokenizer(Protocol):
    def __call__(self, text: str) -> list[int]:
        """Ids without BOS."""


class HashTokenizer:
    """A word is one token, by its hash: for random weights, which no vocabulary means anything to."""

    def __call__(self, text: str) -> list[int]:
        rows = min(SPACE, FIRST_ACTION_TOKEN) - _RESERVED
        return [_RESERVED + zlib.crc32(word.encode()) % rows for word in _WORD.findall(text.lower())]


class LlamaTokenizer:
    """Merges of neighbouring pieces in the order of their rank; what has no piece becomes bytes."""

    def __init__(self, spec: TokenizerSpec) -> None:
        self._ids = spec["vocabulary"]
        self._ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(spec["merges"])}

    def __call__(self, text: str) -> list[int]:
        return [token for piece in self._pieces(_META + text.replace(" ", _META)) for token in self._tokens(piece)]

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


class Prompts:
    """Instructions as ids [B, L] that the network takes: the prompt's tokens after BOS, with padding before them."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._row = lru_cache(maxsize=4096)(lambda text: _row(tokenizer, text, max_tokens))

    def __call__(self, instructions: NDArray[Any]) -> Tensor:
        rows = np.array([self._row(str(text)) for text in instructions], np.int32)
        return torch.from_numpy(rows.reshape(-1, self._max_tokens))


def _row(tokenizer: Tokenizer, text: str, max_tokens: int) -> Sequence[int]:
    ids = tokenizer(PROMPT.format(text.lower()))
    ids += [SPACE] if ids[-1] != SPACE else []
    if len(ids) > max_tokens:
        raise ConfigError(
            f"the prompt for the instruction {text!r} has {len(ids)} tokens, and the policy reads {max_tokens} "
            "(policy.max_tokens)",
            f"set policy.max_tokens in params.yaml to {len(ids)} or more",
        )
    return [PAD] * (max_tokens - len(ids)) + ids


def read_llama(path: Path) -> TokenizerSpec:
    """The tokenizer.json of a checkpoint; DataError unless it is Llama 2's."""
    found = read(path, VOCABULARY, _COPY)
    require_ids(found, {"<s>": BOS, "</s>": STOP, _META: SPACE}, f"{path} is not Llama 2's tokenizer", _COPY)
    return found


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
