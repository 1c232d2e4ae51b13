"""A short soak with a fixed order: the same that `make soak` does for an hour."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.soak.faults import FAULTS
from tests.soak.soak import FIGURES, LOG, Cycle, describe, soak, table

FEW = ("sigkill driver", "dvc.lock with a conflict", "checkpoint damaged", "sigkill Prefect server")


@pytest.mark.slow
def test_nights_that_are_killed_damaged_and_conflicted_lose_nothing_and_end_with_the_same_weights(
    tmp_path: Path,
) -> None:
    few = tuple(fault for fault in FAULTS if fault.name in FEW)
    figures = soak(tmp_path, seed=0, minutes=60, cycles=len(few), faults=few)
    assert {cycle.fault for cycle in figures.cycles} == set(FEW)
    assert not figures.failed, (tmp_path / LOG).read_text()
    told = json.loads((tmp_path / FIGURES).read_text())
    assert (told["cycles"], told["failed"], told["missed"]) == (len(FEW), 0, 0)


def test_a_line_of_the_log_names_cycle_fault_stage_outcome_seconds_and_what_did_not_hold() -> None:
    cycle = Cycle(
        number=3,
        fault="full disk",
        kind="disk",
        stage="sft",
        outcome="refused: error: no space",
        problems=("a file is gone",),
        seconds=12.3,
    )
    assert describe(cycle) == "cycle 3: full disk in sft: refused: error: no space, 12 s\n    NOT HELD: a file is gone"


def test_the_table_has_a_row_per_fault_with_outcomes_and_failures() -> None:
    known: dict[str, Any] = {"kind": "file", "stage": "", "seconds": 1.0}
    cycles = [
        Cycle(number=1, fault="git lock left over", outcome="done", problems=(), **known),
        Cycle(number=2, fault="git lock left over", outcome="refused: error: a", problems=("b",), **known),
    ]
    rows = table(cycles, FAULTS).splitlines()
    assert len(rows) == 2 + len(FAULTS)
    assert "| git lock left over | file | 2 | done 1, refused 1 | 1 |" in rows
    assert "| full disk | disk | 0 | – | 0 |" in rows
