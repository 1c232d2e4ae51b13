"""Words of an instruction as numbers, without a vocabulary: every word has a hash and so an embedding."""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nightshift.policies import readable

PADDING = 0
_ROWS = 1024


def encode(instructions: NDArray[Any], max_words: int) -> Tensor:
    """Instructions [B] as numbers of their words [B, L], int32, with zeros after the last word."""
    rows = np.array([_numbers(str(text), max_words) for text in instructions], np.int32)
    return torch.from_numpy(rows.reshape(-1, max_words))


class WordEmbedding(nn.Module):
    """Hash embeddings: a word is the sum of two rows, one from each of two small tables.

    Words that share one row (likely, in tables of this size) still differ in the other one.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.high = nn.Embedding(_ROWS, width)
        self.low = nn.Embedding(_ROWS, width)
        for table in (self.high, self.low):
            nn.init.trunc_normal_(table.weight, std=0.02)

    def forward(self, words: Tensor) -> Tensor:
        """[B, L] to [B, L, width]; padding too has an embedding, which the caller masks."""
        embedded: Tensor = self.high(words // _ROWS) + self.low(words % _ROWS)
        return embedded


@lru_cache(maxsize=4096)
def _numbers(text: str, max_words: int) -> tuple[int, ...]:
    words = readable.words(text, max_words)
    hashes = [1 + zlib.crc32(word.encode()) % (_ROWS * _ROWS - 1) for word in words]
    return (*hashes, *[PADDING] * (max_words - len(words)))
