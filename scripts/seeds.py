"""Runs the pipeline of params.yaml for several seeds, each in a clone of its own, and prints the result of every one.

A seed whose run has finished is not run again, so an interrupted call can be repeated.
Example: scripts/seeds.py .state/seeds 0 1 2 3 4 5 6 7 8 9
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from nightshift.project import paths
from nightshift.reports import history
from nightshift.statistics.intervals import of_mean

PROJECT = Path(__file__).parents[1]
HEADER = "| seed | after SFT | after RL | won, lost | gain | iteration kept |\n|---|---|---|---|---|---|\n"


def run(folder: Path, seed: int) -> None:
    """The pipeline in a clone, with this checkout's environment."""
    if not folder.exists():
        subprocess.run(["git", "clone", "-q", PROJECT, folder], check=True)
        (folder / ".venv").symlink_to(PROJECT / ".venv")
    params = folder / paths.PARAMS
    params.write_text(re.sub(r"(?m)^seed: \d+", f"seed: {seed}", params.read_text()))
    environment = {**os.environ, "PYTHONPATH": f"{folder / 'src'}:{folder}"}
    subprocess.run([folder / ".venv/bin/nightshift", "run"], cwd=folder, env=environment, check=True)


def row(seed: int, first: dict[str, Any], last: dict[str, Any], kept: int | str) -> str:
    gain = last["gain"]
    before, after = _rate(first["overall"]), _rate(last["overall"])
    points = _points(gain["gain"], gain["low"], gain["high"])
    return f"| {seed} | {before} | {after} | {gain['won']}, {gain['lost']} | {points} | {kept} |\n"


def summary(gains: Sequence[float]) -> str:
    if len(gains) == 1:
        return ""
    return f"\nMean gain over {len(gains)} seeds, in points: {_points(mean(gains), *of_mean(gains))}\n"


def _points(gain: float, low: float, high: float) -> str:
    return f"{100 * gain:+.1f} ({100 * low:+.1f} – {100 * high:+.1f})"


def _rate(overall: dict[str, Any]) -> str:
    low, high = 100 * overall["low"], 100 * overall["high"]
    return f"{100 * overall['rate']:.1f} % ({low:.1f} – {high:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the clones, one per seed")
    parser.add_argument("seeds", type=int, nargs="+")
    chosen = parser.parse_args()
    sys.stdout.write(HEADER)
    gains = []
    for seed in chosen.seeds:
        folder = chosen.folder.absolute() / str(seed)
        if not (folder / paths.RECEIPT).exists():
            run(folder, seed)
        first, *_, last = json.loads((folder / paths.EVALUATION_REPORT).read_text())["candidates"]
        found = history.read(folder / paths.MODELS / last["name"])
        gains.append(last["gain"]["gain"])
        sys.stdout.write(row(seed, first, last, found.kept if found else "–"))
    sys.stdout.write(summary(gains))


if __name__ == "__main__":
    main()
