from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nightshift.data.replay.gather import CACHE_LINE, address, gather, gather_all, prefetch


@settings(deadline=None)
@given(
    row_bytes=st.sampled_from([1, 7, 64, 4095, 4096, 4160, 49152]),
    shift=st.sampled_from([0, 8]),
    rows=st.lists(st.integers(0, 9), max_size=12),
)
def test_rows_arrive_whole_wherever_they_lie(row_bytes: int, shift: int, rows: list[int]) -> None:
    """Large rows into aligned memory take another way than small ones or those that lie across lines."""
    stock = np.random.default_rng(0).integers(0, 256, (10, row_bytes), dtype=np.uint8)
    room = np.zeros(len(rows) * row_bytes + 3 * CACHE_LINE, np.uint8)
    start = -address(room) % CACHE_LINE + shift
    out = room[start : start + len(rows) * row_bytes].reshape(len(rows), row_bytes)
    sources = address(stock) + np.array(rows, np.int64) * row_bytes
    prefetch(sources, row_bytes)
    gather(sources, out)
    assert np.array_equal(out, stock[rows])
    assert not room[:start].any() and not room[start + out.nbytes :].any()


def test_large_jobs_on_several_cores_arrive_whole() -> None:
    stock = np.random.default_rng(0).integers(0, 256, (50, 1 << 16), dtype=np.uint8)
    rows = np.random.default_rng(1).integers(0, 50, (4, 100))
    outs = [np.zeros((100, 1 << 16), np.uint8) for _ in range(4)]
    gather_all([(address(stock) + chosen * stock.shape[1], out) for chosen, out in zip(rows, outs, strict=True)])
    for chosen, out in zip(rows, outs, strict=True):
        assert np.array_equal(out, stock[chosen])
