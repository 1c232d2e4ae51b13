"""A pool of buffers for batches: the memory of a batch is reused once the batch is garbage-collected.

New memory is slower than the copy into it, because the operating system zeroes every page on first access.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nightshift.data.replay.gather import CACHE_LINE, address
from nightshift.data.tensors import Column

MIN_POOLED_BYTES = 1 << 20
"""Smaller arrays are not pooled."""
MAX_POOLED_BYTES = 512 << 20
"""Total size of the free buffers that the pool keeps."""


class BufferPool:
    """Allocates arrays whose memory returns to the pool when the array and all views of it are deleted."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[NDArray[np.uint8]]] = defaultdict(list)
        self._pooled_bytes = 0
        self._lock = threading.RLock()  # reentrant: the garbage collector may delete an array inside these methods

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Column:
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < MIN_POOLED_BYTES:
            return np.empty(shape, dtype)
        return np.asarray(_PooledBuffer(self, self._block(nbytes))).view(dtype).reshape(shape)

    def _block(self, nbytes: int) -> NDArray[np.uint8]:
        with self._lock:
            if not self._blocks[nbytes]:
                block = np.empty(nbytes + CACHE_LINE, np.uint8)
                start = -address(block) % CACHE_LINE  # aligned to a cache line for the streaming stores of `gather`
                return block[start : start + nbytes]
            self._pooled_bytes -= nbytes
            return self._blocks[nbytes].pop()

    def release(self, block: NDArray[np.uint8]) -> None:
        with self._lock:
            if self._pooled_bytes + block.nbytes <= MAX_POOLED_BYTES:
                self._pooled_bytes += block.nbytes
                self._blocks[block.nbytes].append(block)


class _PooledBuffer:
    """The base object of a pooled array; numpy keeps it alive as long as the array or a view of it."""

    def __init__(self, pool: BufferPool, block: NDArray[np.uint8]) -> None:
        self._pool = pool
        self._block = block
        self.__array_interface__ = block.__array_interface__

    def __del__(self) -> None:
        self._pool.release(self._block)
