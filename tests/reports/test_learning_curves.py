"""scripts/learning_curves.py on the files that finished runs leave."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from PIL import Image

from nightshift.project import paths
from nightshift.statistics.intervals import Rate

SCRIPT = Path(__file__).parents[2] / "scripts" / "learning_curves.py"


def finished_run(folder: Path, rates: list[float], solved: int) -> Path:
    for path in (paths.RLOO_HISTORY, paths.EVALUATION_REPORT):
        (folder / path).parent.mkdir(parents=True)
    history = {"iterations": [{"rollout/success": rate} for rate in rates], "validation": [], "kept": len(rates)}
    results = {"sft": Rate(solved, 50), "rloo": Rate(solved + 5, 50)}
    report = {"candidates": [{"name": name, "overall": rate.to_json()} for name, rate in results.items()]}
    (folder / paths.RLOO_HISTORY).write_text(json.dumps(history))
    (folder / paths.EVALUATION_REPORT).write_text(json.dumps(report))
    return folder


def test_curves_and_table_of_two_training_methods(tmp_path: Path) -> None:
    first = [finished_run(tmp_path / f"a{run}", [0.2, 0.8], 25 + run) for run in range(2)]
    second = finished_run(tmp_path / "b", [0.3, 0.4], 10)
    figure = tmp_path / "curves.png"
    told = subprocess.run(
        [sys.executable, SCRIPT, figure, f"RLOO={first[0]},{first[1]}", f"GRPO={second}"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert "| RLOO | 51.0% (38.3% to 63.7%) | 61.0% (48.3% to 73.7%) | 50.0% → 60.0%, 52.0% → 62.0% |" in told
    assert "| GRPO | 20.0% (0.0% to 100.0%) | 30.0% (0.0% to 100.0%) | 20.0% → 30.0% |" in told
    with Image.open(figure) as drawn:
        assert drawn.width > 500
