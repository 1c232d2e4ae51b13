"""Progress as others than the terminal see it."""

from __future__ import annotations

import pytest

from nightshift.telemetry import progress
from nightshift.telemetry.progress import Update


def test_a_listener_hears_every_unit_of_work_with_the_time_left_at_the_pace_of_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[Update] = []
    times = iter([100.0, 110.0, 130.0])
    monkeypatch.setattr("nightshift.telemetry.progress.time.monotonic", lambda: next(times))
    advance = progress._telling(heard.append, lambda note: None, "rloo", 12, 6)
    advance("success 40%")
    advance("success 50%")
    assert heard == [
        Update(what="rloo", done=7, total=12, note="success 40%", seconds_left=50.0),
        Update(what="rloo", done=8, total=12, note="success 50%", seconds_left=60.0),
    ], "what was resumed does not count as fast"


def test_a_bar_outside_the_block_is_not_heard() -> None:
    heard: list[Update] = []
    with progress.listening(heard.append), progress.bar("sft", total=2) as advance:
        advance("")
    with progress.bar("sft", total=2) as advance:
        advance("")
    assert [(update.done, update.total) for update in heard] == [(1, 2)]
