"""scripts/validation_curves.py on the metrics that runs leave."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "validation_curves.py"


def test_runs_are_compared_by_when_they_first_reach_the_goal(tmp_path: Path) -> None:
    for name, rates in {"a": {0: 0.4, 260: 0.95, 510: 0.8}, "b": {0: 0.2, 300: 0.5, 520: 0.6}}.items():
        lines = [{"step": 7, "rollout/success": 1.0}, *({"step": s, "validation/success": r} for s, r in rates.items())]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    groups = [f"with={tmp_path}/a.jsonl,{tmp_path}/a.jsonl", f"without={tmp_path}/b.jsonl,{tmp_path}/b.jsonl"]
    figure = tmp_path / "curves.png"
    done = subprocess.run([sys.executable, SCRIPT, figure, *groups], capture_output=True, text=True, check=True)
    assert "| 0 | 40% (40% – 40%) | 20% (20% – 20%) |" in done.stdout
    assert "| 500 | 95% (95% – 95%) | 50% (50% – 50%) |" in done.stdout
    assert "with, run 0: 90% after 260 (0: 40%, 260: 95%, 510: 80%)" in done.stdout
    assert "without, run 1: 90% after – " in done.stdout
    assert figure.stat().st_size > 1000
