"""The summary on a terminal of 80 columns, with the longest names and numbers that there are."""

from __future__ import annotations

import re
from typing import Any

import pytest
from rich.console import Console

from nightshift.pipeline import summary
from nightshift.pipeline.run import StageResult
from nightshift.pipeline.summary import Summary
from nightshift.statistics.intervals import Rate
from nightshift.statistics.paired import Paired
from tests.conftest import REPOSITORY

LONGEST = "put_the_white_mug_on_the_plate_and_put_the_chocolate_pudding_to_the_right_of_the_plate"
REASON = "version 12 (rloo) becomes champion: there was none, and it solved 500 of 500 states"


def candidate(label: str, gain: Any) -> dict[str, Any]:
    rates = {"overall": Rate(500, 500).to_json(), "tasks": {LONGEST: Rate(0, 500).to_json(), "b": Rate(1, 2).to_json()}}
    return {"name": label.lower(), "label": label, "invalid": 0, "gain": gain, **rates}


def printed(shown: Summary) -> list[str]:
    """Its lines on a terminal of 80 columns."""
    console = Console(width=80)
    with console.capture() as captured:
        console.print(summary.render(shown))
    return captured.get().splitlines()


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
    lines = printed(shown)
    assert max(map(len, lines)) == 80
    assert "…" not in "".join(lines)
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
    [
        (0.04, "0.0 s"),
        (59.4, "59.4 s"),
        (59.97, "1 min 00 s"),
        (187, "3 min 07 s"),
        (3599.7, "1 h 00 min"),
        (3600, "1 h 00 min"),
        (9_030, "2 h 30 min"),
    ],
)
def test_times_of_a_night_are_told_in_hours(seconds: float, shown: str) -> None:
    assert summary.clock(seconds) == shown


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_the_pages_show_the_results_of_the_default_run_as_they_are_printed(page: str) -> None:
    (block,) = re.findall(r"```\n(  held-out success.*?)```", (REPOSITORY / page).read_text(), re.DOTALL)
    solved = {label: int(number) for label, number in re.findall(r"after (\w+) .* (\d+)/200$", block, re.MULTILINE)}
    assert solved.keys() == {"SFT", "RLOO"}
    gain = Paired(states=200, won=solved["RLOO"] - solved["SFT"], lost=0).to_json()
    rates = {label: Rate(number, 200).to_json() for label, number in solved.items()}
    shown = Summary(
        results=[],
        took={},
        evaluation={
            "candidates": [
                {
                    "name": label.lower(),
                    "label": label,
                    "overall": rate,
                    "tasks": {},
                    "invalid": 0,
                    "gain": gain if label == "RLOO" else None,
                }
                for label, rate in rates.items()
            ]
        },
        receipt={
            "model": "nightshift-libero-mini",
            "version": "1",
            "aliases": ["challenger", "champion"],
            "reason": "version 1 (rloo) becomes champion: there was none, and it solved "
            f"{solved['RLOO']} of 200 states",
        },
        seconds=0.0,
    )
    lines = [line.strip("│").rstrip() for line in printed(shown)]
    assert [line for line in block.splitlines() if line and line not in lines] == []
