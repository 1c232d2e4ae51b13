"""scripts/seeds.py on the files that finished runs leave."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from nightshift.project import paths
from nightshift.statistics.intervals import Rate
from nightshift.statistics.paired import Paired

SCRIPT = Path(__file__).parents[2] / "scripts" / "seeds.py"


def finished_run(folder: Path, before: int, won: int, lost: int) -> None:
    for path in (paths.RLOO_HISTORY, paths.EVALUATION_REPORT, paths.RECEIPT):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
    gain = Paired(states=200, won=won, lost=lost).to_json()
    candidates = [
        {"name": "sft", "overall": Rate(before, 200).to_json(), "gain": None},
        {"name": "rloo", "overall": Rate(before + won - lost, 200).to_json(), "gain": gain},
    ]
    (folder / paths.EVALUATION_REPORT).write_text(json.dumps({"candidates": candidates}))
    (folder / paths.RLOO_HISTORY).write_text(json.dumps({"iterations": [], "validation": [], "kept": 8}))
    (folder / paths.RECEIPT).write_text("{}")


def test_every_finished_seed_is_a_row_and_the_mean_gain_has_an_interval_over_seeds(tmp_path: Path) -> None:
    finished_run(tmp_path / "3", 100, won=40, lost=0)
    finished_run(tmp_path / "4", 150, won=22, lost=2)
    told = subprocess.run(
        [sys.executable, SCRIPT, tmp_path, "3", "4"], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert told[2].startswith("| 3 | 50.0 % (43.1 – 56.9) | 70.0 % (63.3 – 75.9) | 40, 0 | +20.0 (")
    assert told[3].endswith("| 8 |")
    assert told[-1] == "Mean gain over 2 seeds, in points: +15.0 (-48.5 – +78.5)"
