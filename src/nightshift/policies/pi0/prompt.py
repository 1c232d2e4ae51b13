"""The instruction as pi0 reads it: BOS, PaliGemma's tokens of the text, a new line, padding."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nightshift.errors import ConfigError
from nightshift.policies import tokenizer
from nightshift.policies.tokenizer import BytePairEncoding, TokenizerSpec

PAD, BOS = 0, 2
_OTHER = "set policy.checkpoint.tokenizer in params.yaml to the tokenizer.json of PaliGemma"


def read_tokenizer(path: Path, rows: int) -> TokenizerSpec:
    """From a tokenizer.json; DataError unless it is PaliGemma's, whose ids are those of `rows` embeddings."""
    found = tokenizer.read(path, rows, _OTHER)
    tokenizer.require_ids(found, {"<pad>": PAD, "<bos>": BOS}, f"{path} is not PaliGemma's tokenizer", _OTHER)
    return found


class Prompts:
    """Instructions as ids [B, L]."""

    def __init__(self, spec: TokenizerSpec, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        encode = BytePairEncoding(spec)
        self._row = lru_cache(maxsize=4096)(lambda text: _row(encode, text, max_tokens))

    def __call__(self, instructions: NDArray[Any]) -> Tensor:
        rows = np.array([self._row(str(text)) for text in instructions], np.int32)
        return torch.from_numpy(rows.reshape(-1, self._max_tokens))


def _row(encode: BytePairEncoding, text: str, max_tokens: int) -> list[int]:
    cleaned = text.strip().replace("_", " ").replace("\n", " ")
    ids = [BOS, *encode(cleaned), *encode("\n")]
    if len(ids) > max_tokens:
        raise ConfigError(
            f"the prompt for the instruction {text!r} has {len(ids)} tokens, and the policy reads {max_tokens} "
            "(policy.max_tokens)",
            f"set policy.max_tokens in params.yaml to {len(ids)} or more",
        )
    return ids + [PAD] * (max_tokens - len(ids))
