"""The prompt as token ids: with the tokenizer of a checkpoint, or by hashing words where there is none."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nightshift.errors import ConfigError
from nightshift.policies.openvla_oft.network import BOS, FIRST_ACTION_TOKEN, PAD, STOP, VOCABULARY
from nightshift.policies.tokenizer import SPACE_PIECE, BytePairEncoding, TokenizerSpec, read, require_ids

SPACE = 29871
"""The token of a lone space. The prompt ends with it, and the first action is read from it."""
PROMPT = "In: What action should the robot take to {}?\nOut:"
_RESERVED = 3
"""Unknown, BOS and stop come first in Llama's vocabulary."""
_COPY = "copy it from the checkpoint that this one was trained from"
_WORD = re.compile(r"\w+")


class Tokenizer(Protocol):
    def __call__(self, text: str) -> list[int]:
        """Ids without BOS."""


class HashTokenizer:
    """A word is one token, by its hash: for random weights, which no vocabulary means anything to."""

    def __call__(self, text: str) -> list[int]:
        rows = min(SPACE, FIRST_ACTION_TOKEN) - _RESERVED
        return [_RESERVED + zlib.crc32(word.encode()) % rows for word in _WORD.findall(text.lower())]


class LlamaTokenizer(BytePairEncoding):
    """Llama puts a space before a text."""

    def __call__(self, text: str) -> list[int]:
        return super().__call__(f" {text}")


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
    require_ids(found, {"<s>": BOS, "</s>": STOP, SPACE_PIECE: SPACE}, f"{path} is not Llama 2's tokenizer", _COPY)
    return found
