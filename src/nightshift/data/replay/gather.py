"""Rows of many arrays copied into one, by address: no Python per row, and other threads run meanwhile.

Whoever calls keeps the arrays alive and has checked that the rows are in them.
"""

from __future__ import annotations

import mmap
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
_PAGE = mmap.PAGESIZE
_WILL_NEED = mmap.MADV_WILLNEED


def address(array: Column) -> int:
    return int(array.__array_interface__["data"][0])


def gather(sources: Addresses, out: Column) -> None:
    """Copy the row at each address into the row of `out`, which is contiguous."""
    if out.size:
        _copy(sources, address(out), out.nbytes // len(out))


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
