"""Compares ways to train: success while training, over runs that differ in their seed, and on held-out states after it.

Each group is a name and the folders of its finished runs. Writes a figure and prints the table that goes with it.
Example: scripts/learning_curves.py curves.png RLOO=a0,a1,a2 GRPO=b0,b1,b2
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nightshift.project import paths
from nightshift.reports import figures
from nightshift.reports.intervals import over_runs

HEADER = "| | after SFT | after RL | each run, before and after |\n|---|---|---|---|\n"


def while_training(runs: Sequence[Path]) -> NDArray[np.float64]:
    """Success of the training episodes, averaged over tasks [runs, iterations]."""
    histories = [json.loads((run / paths.RLOO_HISTORY).read_text()) for run in runs]
    return np.array([[metrics["rollout/success"] for metrics in history] for history in histories])


def row(name: str, runs: Sequence[Path]) -> str:
    before, after = ([_success(run, policy) for run in runs] for policy in ("sft", "rloo"))
    each = ", ".join(f"{first:.1%} → {last:.1%}" for first, last in zip(before, after, strict=True))
    return f"| {name} | {_told(before)} | {_told(after)} | {each} |\n"


def _success(run: Path, policy: str) -> float:
    """On held-out init states, as many of every task."""
    report = json.loads((run / paths.EVALUATION_REPORT).read_text())
    rate: float = report["policies"][policy]["overall"]["rate"]
    return rate


def _told(rates: Sequence[float]) -> str:
    low, high = over_runs(rates)
    return f"{np.mean(rates):.1%} ({low:.1%} – {high:.1%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", type=Path)
    parser.add_argument("groups", nargs="+", help="NAME=FOLDER,FOLDER,…")
    chosen = parser.parse_args()
    groups = {
        name: [Path(run) for run in runs.split(",")] for name, _, runs in (g.partition("=") for g in chosen.groups)
    }
    figures.curves(chosen.figure, {name: while_training(runs) for name, runs in groups.items()})
    sys.stdout.write(HEADER + "".join(row(name, runs) for name, runs in groups.items()))


if __name__ == "__main__":
    main()
