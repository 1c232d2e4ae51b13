"""Compares training methods over seeds: sampled success during training, and success on held-out states after it.

Each group is a name and the folders of its finished runs, which differ in their seed. Writes a figure of the last
candidate's training and prints a table of the first and the last candidate.
Example: scripts/learning_curves.py curves.png RLOO=a0,a1,a2 GRPO=b0,b1,b2
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nightshift.project import paths
from nightshift.reports import figures, history
from nightshift.statistics.intervals import over_runs

HEADER = "| | before RL | after RL | each run, before and after |\n|---|---|---|---|\n"


def sampled_success(runs: Sequence[Path]) -> NDArray[np.float64]:
    """During the training of the last candidate, averaged over tasks [runs, iterations]."""
    curves = []
    for run in runs:
        folder = run / paths.MODELS / _candidates(run)[-1]["name"]
        found = history.read(folder)
        if found is None:
            raise SystemExit(f"{folder / paths.HISTORY} does not exist: the last candidate of {run} has no iterations")
        curves.append(list(found.metric(history.SAMPLED_SUCCESS).values()))
    return np.array(curves)


def row(name: str, runs: Sequence[Path]) -> str:
    before, after = ([_candidates(run)[place]["overall"]["rate"] for run in runs] for place in (0, -1))
    each = ", ".join(f"{first:.1%} → {last:.1%}" for first, last in zip(before, after, strict=True))
    return f"| {name} | {_told(before)} | {_told(after)} | {each} |\n"


def _candidates(run: Path) -> list[dict[str, Any]]:
    """Results on held-out init states, in the order of training."""
    results: list[dict[str, Any]] = json.loads((run / paths.EVALUATION_REPORT).read_text())["candidates"]
    return results


def _told(rates: Sequence[float]) -> str:
    low, high = over_runs(rates)
    return f"{np.mean(rates):.1%} ({low:.1%} to {high:.1%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", type=Path)
    parser.add_argument("groups", nargs="+", help="NAME=FOLDER,FOLDER,…")
    chosen = parser.parse_args()
    groups = {
        name: [Path(run) for run in runs.split(",")] for name, _, runs in (g.partition("=") for g in chosen.groups)
    }
    figures.curves(chosen.figure, {name: sampled_success(runs) for name, runs in groups.items()})
    sys.stdout.write(HEADER + "".join(row(name, runs) for name, runs in groups.items()))


if __name__ == "__main__":
    main()
