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
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from nightshift.data.tensors import Column

Addresses = NDArray[np.int64]

_size = types.intp
_memcpy: Any = types.ExternalFunction("memcpy", _size(_size, _size, _size))
_madvise: Any = types.ExternalFunction("madvise", types.intc(_size, _size, types.intc))
LINE = 64
"""Bytes of a cache line."""
_LARGE_ROW = 4096
_WORTH_THREADS = 8 << 20
_THREADS = min(4, os.cpu_count() or 1)
_PAGE = mmap.PAGESIZE
_WILL_NEED = mmap.MADV_WILLNEED


def address(array: Column) -> int:
    return int(array.__array_interface__["data"][0])


def gather(sources: Addresses, out: Column) -> None:
    """Copy the row at each address into the row of `out`, which is contiguous."""
    if not out.size:
        return
    target, row_bytes = address(out), out.nbytes // len(out)
    if row_bytes >= _LARGE_ROW and row_bytes % LINE == 0 and target % LINE == 0:
        _stream(sources, target, row_bytes)
    else:
        _copy(sources, target, row_bytes)


def gather_all(jobs: Sequence[tuple[Addresses, Column]]) -> None:
    """`gather` each; large ones on several cores, in threads that live only as long, so that a fork finds none."""
    is_large = sum(out.nbytes for _, out in jobs) >= _WORTH_THREADS
    mine, *others = [jobs[start::_THREADS] for start in range(_THREADS)] if is_large else [jobs]
    with ThreadPoolExecutor(max_workers=_THREADS) as pool:
        at_work = [pool.submit(_gather_each, share) for share in others]
        _gather_each(mine)
        for share in at_work:
            share.result()


def _gather_each(jobs: Sequence[tuple[Addresses, Column]]) -> None:
    for sources, out in jobs:
        gather(sources, out)


def prefetch(sources: Addresses, nbytes: int) -> None:
    """Have the operating system read rows of mapped files, all at once instead of one by one as they are touched."""
    _announce(sources, nbytes)


@intrinsic
def _store_line(_: Any, target: Any, source: Any) -> Any:
    """Copy one line past the caches: a batch is larger than they are, and a line need not be read to be written."""

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        line = ir.VectorType(ir.IntType(64), LINE // 8)
        to, origin = (builder.inttoptr(argument, line.as_pointer()) for argument in arguments)
        value = builder.load(origin)
        value.align = 1
        stored = builder.store(value, to)
        stored.align = LINE
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@intrinsic
def _finish_stores(_: Any) -> Any:
    """What went past the caches is there for every thread."""

    def generate(context: Any, builder: Any, _: Any, __: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@numba.njit(cache=True, nogil=True)
def _stream(sources, out, nbytes):  # type: ignore[no-untyped-def]
    for row in range(len(sources)):
        for offset in range(0, nbytes, LINE):
            _store_line(out + row * nbytes + offset, sources[row] + offset)  # type: ignore[call-arg]
    _finish_stores()  # type: ignore[call-arg]


@numba.njit(cache=True, nogil=True)
def _copy(sources, out, nbytes):  # type: ignore[no-untyped-def]
    for row in range(len(sources)):
        _memcpy(out + row * nbytes, sources[row], nbytes)


@numba.njit(cache=True, nogil=True)
def _announce(sources, nbytes):  # type: ignore[no-untyped-def]
    for row in range(len(sources)):
        start = sources[row] // _PAGE * _PAGE
        _madvise(start, sources[row] + nbytes - start, _WILL_NEED)
