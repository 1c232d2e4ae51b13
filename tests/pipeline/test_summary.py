"""The summary on a terminal of 80 columns, with the longest names and numbers that there are."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from nightshift.pipeline import summary
from nightshift.pipeline.run import StageResult
from nightshift.pipeline.summary import Summary
from nightshift.statistics.intervals import Rate

LONGEST = "put_the_white_mug_on_the_plate_and_put_the_chocolate_pudding_to_the_right_of_the_plate"
REASON = "version 12 (rloo) becomes champion: there was none, and it solved 500 of 500 states"


def candidate(label: str, gain: Any) -> dict[str, Any]:
    rates = {"overall": Rate(500, 500).to_json(), "tasks": {LONGEST: Rate(0, 500).to_json(), "b": Rate(1, 2).to_json()}}
    return {"name": label.lower(), "label": label, "invalid": 0, "gain": gain, **rates}


def test_no_label_or_number_is_cut_at_80_columns() -> None:
    gain = {"states": 1000, "won": 0, "lost": 1000, "gain": -1.0, "low": -1.0, "high": 1.0, "p_value": 0.5}
    champion = {key: value for key, value in candidate("", None).items() if key != "label"} | {"version": "12"}
    shown = Summary(
        results=[StageResult(stage="evaluate", status="ran", seconds=86_000.0, reasons=(f"{LONGEST} 1 → 2",))],
        took={},
        evaluation={"candidates": [candidate("SFT", None), candidate("REINFORCE++", gain)], "champion": champion},
        receipt={"model": "nightshift-libero-mini", "version": "12", "aliases": ["champion"], "reason": REASON},
        seconds=90_000.0,
    )
    console = Console(width=80)
    with console.capture() as captured:
        console.print(summary.render(shown))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) == 80
    assert "…" not in captured.get()
    cells = "".join(line.strip("│ ")[:22].strip() for line in lines)
    assert LONGEST in cells, "folded, and whole"
    words = " ".join(" ".join(line.strip("│ ") for line in lines).split())
    for whole in (
        "-100.0 to +100.0",
        "99.2 to 100.0",
        "after REINFORCE++",
        "champion, version 12",
        "23 h 53 min",
        REASON,
    ):
        assert whole in words, whole


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.04, "0.0 s"), (59.4, "59.4 s"), (187, "3 min 07 s"), (3600, "1 h 00 min"), (9_030, "2 h 30 min")],
)
def test_times_of_a_night_are_told_in_hours(seconds: float, shown: str) -> None:
    assert summary.clock(seconds) == shown
