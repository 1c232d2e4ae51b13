"""scripts/intervention_curves.py on the metrics that runs leave."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from nightshift.telemetry import experience, interventions

SCRIPT = Path(__file__).parents[2] / "scripts" / "intervention_curves.py"


def leave(path: Path, *rounds: tuple[float, float, float]) -> str:
    """Rounds of four episodes and 100 decisions: interventions per episode, share, steps between."""
    lines = [
        {
            "step": 100 * number,
            experience.EPISODES: 4 * number,
            interventions.PER_EPISODE: often,
            interventions.SHARE: share,
            interventions.STEPS_BETWEEN: between,
        }
        for number, (often, share, between) in enumerate(rounds, start=1)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in [{"step": 0, "validation/success": 0.4}, *lines]))
    return str(path)


def test_what_a_window_has_is_counted_together_and_steps_become_seconds(tmp_path: Path) -> None:
    first = leave(tmp_path / "a.jsonl", *[(1.0, 0.2, 20.0), (0.0, 0.0, 100.0)] * 5)
    second = leave(tmp_path / "b.jsonl", *[(0.5, 0.5, 25.0), (0.5, 0.5, 25.0)] * 5)
    figure = tmp_path / "falling.png"
    command = [sys.executable, str(SCRIPT), str(figure), first, second, "--windows", "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    own = " | ".join(", ".join([value] * 5) for value in ("0.50", "10.00", "2.25"))
    assert f"| {first} | {own} |" in done.stdout, "180 steps of the policy, and 4 interventions, in each fifth"
    own = " | ".join(", ".join([value] * 5) for value in ("0.50", "50.00", "1.25"))
    assert f"| {second} | {own} |" in done.stdout
    assert figure.stat().st_size > 1000


def test_a_run_without_interventions_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path / "a.png"), leave(tmp_path / "a.jsonl")]
    done = subprocess.run(command, capture_output=True, check=False)
    assert b"give metrics of rlpd with interventions" in done.stderr


def test_more_windows_than_rounds_are_refused(tmp_path: Path) -> None:
    metrics = leave(tmp_path / "a.jsonl", *[(1.0, 0.2, 20.0)] * 3)
    command = [sys.executable, str(SCRIPT), str(tmp_path / "a.png"), metrics, "--windows", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert f"{metrics} has 3 rounds: give at most --windows 3" in done.stderr and done.returncode == 1
