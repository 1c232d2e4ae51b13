"""Memory for batches, used again once nobody holds the batch any more.

Fresh memory costs more than what is copied into it: the operating system clears every page when it is first touched.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nightshift.data.replay.gather import LINE, address
from nightshift.data.tensors import Column

SMALLEST = 1 << 20
"""Bytes below which memory is cheap."""
MOST_KEPT = 512 << 20
"""Bytes that wait to be used again."""


class Recycler:
    """Gives out arrays whose memory comes back when they, and all views of them, are gone."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[NDArray[np.uint8]]] = defaultdict(list)
        self._kept = 0
        self._lock = threading.RLock()  # an array may be let go of anywhere, here too

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Column:
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < SMALLEST:
            return np.empty(shape, dtype)
        return np.asarray(_Lease(self, self._block(nbytes))).view(dtype).reshape(shape)

    def _block(self, nbytes: int) -> NDArray[np.uint8]:
        with self._lock:
            if not self._blocks[nbytes]:
                block = np.empty(nbytes + LINE, np.uint8)
                start = -address(block) % LINE  # of a cache line, which is what `gather` can write fastest
                return block[start : start + nbytes]
            self._kept -= nbytes
            return self._blocks[nbytes].pop()

    def give_back(self, block: NDArray[np.uint8]) -> None:
        with self._lock:
            if self._kept + block.nbytes <= MOST_KEPT:
                self._kept += block.nbytes
                self._blocks[block.nbytes].append(block)


class _Lease:
    """The owner of an array's memory as numpy sees it: alive as long as the array or a view of it."""

    def __init__(self, recycler: Recycler, block: NDArray[np.uint8]) -> None:
        self._recycler = recycler
        self._block = block
        self.__array_interface__ = block.__array_interface__

    def __del__(self) -> None:
        self._recycler.give_back(self._block)
