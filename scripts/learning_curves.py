"""Compares ways to train: success while training, over runs that differ in their seed, and on held-out states after it.

Each group is a name and the folders of its finished runs. Writes a figure and prints the table that goes with it.
Example: scripts/learning_curves.py curves.png RLOO=a0,a1,a2 GRPO=b0,b1,b2
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nightshift import paths
from nightshift.reports import figures
from nightshift.reports.intervals import over_runs

PREFIX = "rollout/success/"
HEADER = "| | after SFT | after RL | each run, before and after |\n|---|---|---|---|\n"


def while_training(runs: Sequence[Path]) -> NDArray[np.float64]:
    """Success of the training episodes [runs, iterations, tasks]."""
    histories = [json.loads((run / paths.RLOO_HISTORY).read_text()) for run in runs]
    tasks = sorted(name for name in histories[0][0] if name.startswith(PREFIX))
    return np.array([[[metrics[name] for name in tasks] for metrics in history] for history in histories])


def row(name: str, runs: Sequence[Path]) -> str:
    reports = [json.loads((run / paths.EVALUATION_REPORT).read_text())["policies"] for run in runs]
    each = ", ".join(f"{_rate(report, 'sft'):.1%} → {_rate(report, 'rloo'):.1%}" for report in reports)
    return f"| {name} | {_interval(reports, 'sft')} | {_interval(reports, 'rloo')} | {each} |\n"


def _rate(report: Mapping[str, Any], policy: str) -> float:
    rate: float = report[policy]["overall"]["rate"]
    return rate


def _interval(reports: Sequence[Mapping[str, Any]], policy: str) -> str:
    scores = np.array([[task["rate"] for task in report[policy]["tasks"].values()] for report in reports])
    low, high = over_runs(scores)
    return f"{scores.mean():.1%} ({low:.1%} – {high:.1%})"


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
