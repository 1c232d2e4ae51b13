from __future__ import annotations

import numpy as np
import torch

from nightshift.data.replay import buffer_pool
from nightshift.data.replay.buffer_pool import BufferPool

SHAPE = (buffer_pool.MIN_POOLED_BYTES, 2)
FLOAT = np.dtype(np.float32)


def place(array: object) -> int:
    return int(np.asarray(array).__array_interface__["data"][0])


def test_memory_is_used_again_once_the_array_is_gone() -> None:
    pool = BufferPool()
    array = pool.empty(SHAPE, FLOAT)
    first = place(array)
    del array
    assert place(pool.empty(SHAPE, FLOAT)) == first


def test_memory_that_any_view_still_shows_is_not_given_out() -> None:
    pool = BufferPool()
    array = pool.empty(SHAPE, FLOAT)
    array[:] = 1
    for hold in (lambda a: a, lambda a: a[5:9].T, torch.from_numpy, lambda a: torch.from_numpy(a[0])[1:]):
        held = hold(array)
        del array
        other = pool.empty(SHAPE, FLOAT)
        other[:] = 2
        assert (np.asarray(held) == 1).all()
        del other, held
        array = pool.empty(SHAPE, FLOAT)
        array[:] = 1


def test_no_more_is_kept_than_allowed() -> None:
    pool = BufferPool()
    nbytes = buffer_pool.MAX_POOLED_BYTES // 3
    arrays = [pool.empty((nbytes,), np.dtype(np.uint8)) for _ in range(5)]
    del arrays
    assert pool._pooled_bytes == 3 * nbytes == sum(b.nbytes for blocks in pool._blocks.values() for b in blocks)


def test_arrays_can_be_written_and_have_the_form_asked_for() -> None:
    for shape in ((2, 3), (1 << 20, 2)):
        array = BufferPool().empty(shape, FLOAT)
        assert array.shape == shape and array.dtype == FLOAT and array.flags.writeable and array.flags.c_contiguous
