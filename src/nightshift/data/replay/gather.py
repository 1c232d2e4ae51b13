"""Copies rows of many arrays into one array by memory address, without Python code per row and without the GIL.

The caller must keep the source arrays alive and must have checked that the rows are in bounds.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from nightshift.data.tensors import Column

Addresses = NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """An array whose rows have not been copied together yet; `gather_rows` does it, once for several sources."""

    addresses: Addresses  # [n, k]: each row of the array is k rows in memory
    shape: tuple[int, ...]  # [n, …]
    dtype: np.dtype[Any]
    owners: tuple[object, ...]  # keep the memory at these addresses alive
    is_cold: bool  # some of it may not be in the page cache

    def __len__(self) -> int:
        return self.shape[0]

    @classmethod
    def of(cls, array: Column, pieces: int) -> Rows:
        """An array in memory, each row in `pieces` equal parts."""
        array = np.ascontiguousarray(array)
        offsets = np.arange(len(array) * pieces) * (array.nbytes // (len(array) * pieces))
        return cls(
            addresses=(address(array) + offsets).reshape(len(array), pieces),
            shape=array.shape,
            dtype=array.dtype,
            owners=(array,),
            is_cold=False,
        )

    @classmethod
    def merged(cls, parts: Sequence[tuple[NDArray[np.int64], Rows]], count: int) -> Rows:
        """The `count` rows of several arrays of one shape and dtype; each part has the places of its rows."""
        _, first = parts[0]
        addresses = np.empty((count, first.addresses.shape[1]), np.int64)
        for places, part in parts:
            addresses[places] = part.addresses
        return cls(
            addresses=addresses,
            shape=(count, *first.shape[1:]),
            dtype=first.dtype,
            owners=tuple(owner for _, part in parts for owner in part.owners),
            is_cold=any(part.is_cold for _, part in parts),
        )


_size = types.intp
_memcpy: Any = types.ExternalFunction("memcpy", _size(_size, _size, _size))
_madvise: Any = types.ExternalFunction("madvise", types.intc(_size, _size, types.intc))
CACHE_LINE = 64
"""Bytes of a cache line."""
_MIN_STREAMED_ROW = 4096
_MIN_PARALLEL_BYTES = 8 << 20
_THREADS = min(4, os.cpu_count() or 1)
_PAGE = mmap.PAGESIZE
_WILL_NEED = mmap.MADV_WILLNEED


def address(array: Column) -> int:
    return int(array.__array_interface__["data"][0])


def gather(sources: Addresses, out: Column) -> None:
    """Copy the row at address `sources[i]` into `out[i]`; `out` is contiguous."""
    if not out.size:
        return
    target, row_bytes = address(out), out.nbytes // len(out)
    if row_bytes >= _MIN_STREAMED_ROW and row_bytes % CACHE_LINE == 0 and target % CACHE_LINE == 0:
        _copy_streaming(sources, target, row_bytes)
    else:
        _copy(sources, target, row_bytes)


def gather_all(jobs: Sequence[tuple[Addresses, Column]]) -> None:
    """`gather` each; large jobs in several threads, which end with the call so that a later fork is safe."""
    is_large = sum(out.nbytes for _, out in jobs) >= _MIN_PARALLEL_BYTES
    first, *rest = [jobs[start::_THREADS] for start in range(_THREADS)] if is_large else [jobs]
    with ThreadPoolExecutor(max_workers=_THREADS) as pool:
        futures = [pool.submit(_gather_each, share) for share in rest]
        _gather_each(first)
        for share in futures:
            share.result()


def _gather_each(jobs: Sequence[tuple[Addresses, Column]]) -> None:
    for sources, out in jobs:
        gather(sources, out)


def prefetch(sources: Addresses, nbytes: int) -> None:
    """Let the operating system read rows of mapped files in parallel, instead of one page fault after the other."""
    _madvise_rows(sources, nbytes)


@intrinsic
def _store_line(_: Any, target: Any, source: Any) -> Any:
    """Copy one cache line with a non-temporal store: a batch does not fit into the caches."""

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        line = ir.VectorType(ir.IntType(64), CACHE_LINE // 8)
        to, origin = (builder.inttoptr(argument, line.as_pointer()) for argument in arguments)
        value = builder.load(origin)
        value.align = 1
        stored = builder.store(value, to)
        stored.align = CACHE_LINE
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@intrinsic
def _store_fence(_: Any) -> Any:
    """Make non-temporal stores visible to all threads."""

    def generate(context: Any, builder: Any, _: Any, __: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@numba.njit(cache=True, nogil=True)
def _copy_streaming(sources, out, nbytes):  # type: ignore[no-untyped-def]
    for row in range(len(sources)):
        for offset in range(0, nbytes, CACHE_LINE):
            _store_line(out + row * nbytes + offset, sources[row] + offset)  # type: ignore[call-arg]
    _store_fence()  # type: ignore[call-arg]


@numba.njit(cache=True, nogil=True)
def _copy(sources, out, nbytes):  # type: ignore[no-untyped-def]
    for row in range(len(sources)):
        _memcpy(out + row * nbytes, sources[row], nbytes)


@numba.njit(cache=True, nogil=True)
def _madvise_rows(sources, nbytes):  # type: ignore[no-untyped-def]
    for row in range(len(sources)):
        start = sources[row] // _PAGE * _PAGE
        _madvise(start, sources[row] + nbytes - start, _WILL_NEED)
