"""Rows of many arrays copied into one, by address: no Python per row, and other threads run meanwhile.

Whoever calls keeps the arrays alive and has checked that the rows are in them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from nightshift.data.tensors import Column

Addresses = NDArray[np.int64]

_size = types.intp
_memcpy: Any = types.ExternalFunction("memcpy", _size(_size, _size, _size))
_madvise: Any = types.ExternalFunction("madvise", types.intc(_size, _size, types.intc))
_WORTH_THREADS = 8 << 20
_THREADS = min(4, os.cpu_count() or 1)
_PAGE = mmap.PAGESIZE
_WILL_NEED = mmap.MADV_WILLNEED


def address(array: Column) -> int:
    return int(array.__array_interface__["data"][0])


def gather(sources: Addresses, out: Column) -> None:
    """Copy the row at each address into the row of `out`, which is contiguous."""
    if out.size:
        _copy(sources, address(out), out.nbytes // len(out))


def gather_all(jobs: Sequence[tuple[Addresses, Column]]) -> None:
    """`gather` each; large ones on several cores, in threads that live only as long, so that a fork finds none."""
    if sum(out.nbytes for _, out in jobs) < _WORTH_THREADS:
        for sources, out in jobs:
            gather(sources, out)
        return
    with ThreadPoolExecutor(max_workers=min(len(jobs), _THREADS)) as pool:
        for done in [pool.submit(gather, sources, out) for sources, out in jobs]:
            done.result()


def prefetch(sources: Addresses, nbytes: int) -> None:
    """Have the operating system read rows of mapped files, all at once instead of one by one as they are touched."""
    _announce(sources, nbytes)


@numba.njit(cache=True, nogil=True)
def _copy(sources, out, nbytes):  # type: ignore[no-untyped-def]
    for row in range(len(sources)):
        _memcpy(out + row * nbytes, sources[row], nbytes)


@numba.njit(cache=True, nogil=True)
def _announce(sources, nbytes):  # type: ignore[no-untyped-def]
    for row in range(len(sources)):
        start = sources[row] // _PAGE * _PAGE
        _madvise(start, sources[row] + nbytes - start, _WILL_NEED)
