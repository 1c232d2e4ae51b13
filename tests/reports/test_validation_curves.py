"""scripts/validation_curves.py on the metrics that runs leave."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from scripts.validation_curves import paired_test

SCRIPT = Path(__file__).parents[2] / "scripts" / "validation_curves.py"


def test_runs_are_compared_by_when_they_first_reach_the_goal(tmp_path: Path) -> None:
    for name, rates in {"a": {0: 0.4, 260: 0.95, 510: 0.8}, "b": {0: 0.2, 300: 0.5, 520: 0.6}}.items():
        lines = [{"step": 7, "rollout/success": 1.0}, *({"step": s, "validation/success": r} for s, r in rates.items())]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    groups = [f"with={tmp_path}/a.jsonl,{tmp_path}/a.jsonl", f"without={tmp_path}/b.jsonl,{tmp_path}/b.jsonl"]
    figure = tmp_path / "curves.png"
    command = [sys.executable, str(SCRIPT), str(figure), *groups, "--never", "600"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "| 0 | 40% (40% – 40%) | 20% (20% – 20%) |" in done.stdout
    assert "| 500 | 95% (95% – 95%) | 50% (50% – 50%) |" in done.stdout
    assert "with, run 0: 90% after 260 (0: 40%, 260: 95%, 510: 80%)" in done.stdout
    assert "without, run 1: 90% after – " in done.stdout
    assert figure.stat().st_size > 1000
    assert "90% with - without: -340 decisions on average, p = 0.500" in done.stdout  # both signs of two pairs: 2 of 4
    assert "with is sooner in 2 of 2 pairs" in done.stdout


def test_a_difference_of_pairs_is_tested_against_all_flips_of_its_signs() -> None:
    """Decisions to 90 % of seeds 16 to 22 with and without interventions, as docs/results.md has them."""
    helped = [20_200, 8_137, 13_194, 9_149, 4_125, 8_220, 7_103]
    alone = [6_146, 19_068, 20_200, 18_063, 16_172, 20_200, 11_099]
    differences = [a - b for a, b in zip(helped, alone, strict=True)]
    flips = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in product((1, -1), repeat=7)]
    mean, p_value = paired_test(helped, alone)
    assert mean == pytest.approx(sum(differences) / 7)
    assert p_value == pytest.approx(sum(flip >= abs(sum(differences)) for flip in flips) / 2**7)
