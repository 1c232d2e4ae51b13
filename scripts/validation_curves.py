"""Compares training settings by the greedy success on validation states over decisions of experience.

Each group is a name and the metrics of its runs (.state/metrics/rlpd-*.jsonl of a project), which differ in their seed.
Writes a figure and prints all validations, the mean with its 95 % interval over runs (Student's t) at steps of a grid,
and the decisions after which a run first reached the goal. With --never, the runs of two groups are pairs (the same
seeds in the same order): prints the mean difference of those decisions and its exact sign-flip permutation test.
Example: scripts/validation_curves.py curves.png with=a0.jsonl,a1.jsonl without=b0.jsonl,b1.jsonl --grid 250
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from scipy.stats import permutation_test

from nightshift.statistics.intervals import over_runs

SUCCESS = "validation/success"
Curve = Mapping[int, float]
"""Success by decisions, ascending."""


def read(path: Path) -> Curve:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return dict(sorted((line["step"], line[SUCCESS]) for line in lines if SUCCESS in line))


def at(curve: Curve, decisions: int) -> float:
    """Of the last validation up to then."""
    return [rate for step, rate in curve.items() if step <= decisions][-1]


def first_at(curve: Curve, goal: float) -> int | None:
    """The decisions of the first validation that reaches the goal; None if none does."""
    return next((step for step, rate in curve.items() if rate >= goal), None)


def grid(groups: Mapping[str, Sequence[Curve]], spacing: int) -> list[int]:
    """From where all runs have a validation to as far as all have come."""
    curves = [curve for curves in groups.values() for curve in curves]
    start, end = max(min(curve) for curve in curves), min(max(curve) for curve in curves)
    return [step for step in range(0, end + 1, spacing) if step >= start]


def tables(groups: Mapping[str, Sequence[Curve]], spacing: int, goal: float) -> str:
    steps = grid(groups, spacing)
    text = f"| decisions | {' | '.join(groups)} |\n|---|{'---|' * len(groups)}\n"
    for step in steps:
        text += f"| {step:,} | {' | '.join(_told([at(curve, step) for curve in c]) for c in groups.values())} |\n"
    for name, curves in groups.items():
        for run, curve in enumerate(curves):
            first = first_at(curve, goal)
            seen = ", ".join(f"{step:,}: {rate:.0%}" for step, rate in curve.items())
            text += f"{name}, run {run}: {goal:.0%} after {'–' if first is None else f'{first:,}'} ({seen})\n"
    return text


def paired_test(one: Sequence[int], other: Sequence[int]) -> tuple[float, float]:
    """The mean difference of pairs, and its two-sided p value: without an effect both signs are as likely."""
    test = permutation_test(
        (one, other), lambda a, b, axis: np.mean(a - b, axis=axis), permutation_type="samples", n_resamples=np.inf
    )
    return float(test.statistic), float(test.pvalue)


def comparison(groups: Mapping[str, Sequence[Curve]], goal: float, never: int) -> str:
    """Of the decisions to the goal; `never` stands for those of a run that does not reach it."""
    firsts = [[first_at(curve, goal) for curve in curves] for curves in groups.values()]
    reached = [[never if first is None else first for first in of_group] for of_group in firsts]
    difference, p_value = paired_test(*reached)
    sooner = sum(a < b for a, b in zip(*reached, strict=True))
    one, other = groups
    return (
        f"{goal:.0%} {one} - {other}: {difference:+,.0f} decisions on average, p = {p_value:.3f} (exact sign-flip "
        f"permutation, two-sided); {one} is sooner in {sooner} of {len(reached[0])} pairs\n"
    )


def _told(rates: Sequence[float]) -> str:
    low, high = over_runs(rates)
    return f"{np.mean(rates):.0%} ({low:.0%} – {high:.0%})"


def draw(path: Path, groups: Mapping[str, Sequence[Curve]], spacing: int) -> None:
    """Each run thin, and the mean of each group with its interval."""
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    steps = grid(groups, spacing)
    for (name, curves), style in zip(groups.items(), itertools.cycle(("-", "--", "-.", ":")), strict=False):
        rates = np.array([[at(curve, step) for curve in curves] for step in steps])
        (line,) = axes.plot(steps, rates.mean(axis=1), style, label=name, linewidth=2)
        low, high = np.array([over_runs(runs) for runs in rates.tolist()]).T
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        for curve in curves:
            axes.plot(list(curve), list(curve.values()), style, color=line.get_color(), linewidth=0.7)
    axes.set(
        xlabel="decisions", ylabel="success", title="Greedy success on validation states, 95 % intervals over runs"
    )
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", type=Path)
    parser.add_argument("groups", nargs="+", help="NAME=FILE,FILE,…")
    parser.add_argument("--grid", type=int, default=250, help="decisions between two rows of the table")
    parser.add_argument("--goal", type=float, default=0.9)
    parser.add_argument("--never", type=int, help="decisions that count for a run which does not reach the goal")
    chosen = parser.parse_args()
    named = dict(group.split("=", 1) for group in chosen.groups)
    groups = {name: [read(Path(file)) for file in listed.split(",")] for name, listed in named.items()}
    if chosen.never and [len(curves) for curves in groups.values()] != 2 * [len(next(iter(groups.values())))]:
        parser.error("--never compares two groups of as many runs each, the same seeds in the same order")
    draw(chosen.figure, groups, chosen.grid)
    sys.stdout.write(tables(groups, chosen.grid, chosen.goal))
    if chosen.never:
        sys.stdout.write(comparison(groups, chosen.goal, chosen.never))


if __name__ == "__main__":
    main()
