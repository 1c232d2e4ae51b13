"""Shows whether a policy is helped less as it learns, over decisions of experience.

Takes the metrics of runs with interventions (.state/metrics/rlpd-*.jsonl of a project), which differ in their seed.
Writes a figure of interventions per episode, the intervened share of steps and the time between two interventions, in
windows of the training: the mean over runs with its 95 % interval (Student's t), and each run thin. Prints the same per
run, in fifths of the training. Episodes, steps and interventions of a window are counted together; the time between
is the policy's own steps per intervention, and all of them in a window without one: at least so long, then.
Example: python scripts/intervention_curves.py falling.png .state/with/*/.state/metrics/rlpd-*.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from numpy.typing import NDArray

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from nightshift.envs.base import Suite
from nightshift.statistics.intervals import of_mean
from nightshift.telemetry import experience, interventions

FIFTHS = 5
SHOWN = ("interventions per episode", "intervened steps (%)", "seconds between interventions, at least")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What was counted in every round [rounds]."""

    ends: NDArray[np.float64]
    """Decisions of the training at the end of the round."""
    decisions: NDArray[np.float64]
    episodes: NDArray[np.float64]
    began: NDArray[np.float64]
    """Interventions."""
    intervened: NDArray[np.float64]
    """Decisions of somebody else."""
    alone: NDArray[np.float64]
    """Control steps of the policy."""

    def within(self, edges: NDArray[np.float64], control_hz: float) -> NDArray[np.float64]:
        """What is shown [3, windows]; NaN in a window without a round."""
        windows = np.searchsorted(edges, self.ends) - 1

        def total(counts: NDArray[np.float64]) -> NDArray[np.float64]:
            return np.array([counts[windows == window].sum() for window in range(len(edges) - 1)])

        began, episodes = total(self.began), total(self.episodes)
        with np.errstate(invalid="ignore"):
            per_episode, share = began / episodes, 100 * total(self.intervened) / total(self.decisions)
        between = np.where(episodes > 0, total(self.alone) / began.clip(1) / control_hz, np.nan)
        return np.stack([per_episode, share, between])


def read(path: Path) -> Run:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    rounds = [line for line in lines if interventions.SHARE in line]
    if not rounds:
        sys.exit(f"{path} has no {interventions.SHARE}: give metrics of rlpd with interventions")

    def column(name: str) -> NDArray[np.float64]:
        return np.array([one[name] for one in rounds], np.float64)

    decisions, episodes = (np.diff(column(name), prepend=0) for name in ("step", experience.EPISODES))
    began = column(interventions.PER_EPISODE) * episodes
    return Run(
        ends=column("step"),
        decisions=decisions,
        episodes=episodes,
        began=began,
        intervened=column(interventions.SHARE) * decisions,
        alone=column(interventions.STEPS_BETWEEN) * began.clip(1),
    )


def table(runs: Mapping[str, Run], control_hz: float) -> str:
    text = f"| run | {' | '.join(SHOWN)} |\n|---|{'---|' * len(SHOWN)}\n"
    for name, run in runs.items():
        fifths = run.within(np.linspace(0, run.ends[-1], FIFTHS + 1), control_hz)
        text += f"| {name} | {' | '.join(', '.join(f'{value:.2f}' for value in one) for one in fifths)} |\n"
    return text


def draw(path: Path, runs: Sequence[Run], count: int, control_hz: float) -> None:
    """`count` windows, up to where every run has come."""
    edges = np.linspace(0, min(run.ends[-1] for run in runs), count + 1)
    centres = (edges[:-1] + edges[1:]) / 2
    found = np.stack([run.within(edges, control_hz) for run in runs], axis=1)
    figure, panels = plt.subplots(1, len(SHOWN), figsize=(12, 3.6), layout="constrained")
    for axes, words, values in zip(panels, SHOWN, found, strict=True):
        (line,) = axes.plot(centres, values.mean(axis=0), "o-", linewidth=2, markersize=4)
        axes.plot(centres, values.T, color=line.get_color(), linewidth=0.6, alpha=0.6)
        if len(runs) > 1:
            low, high = np.array([of_mean(one) for one in values.T.tolist()]).T
            axes.fill_between(centres, low.clip(0), high, color=line.get_color(), alpha=0.2, linewidth=0)
        axes.set(xlabel="decisions", title=words, xlim=(0, edges[-1]), ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{len(runs)} runs (thin), their mean and its 95 % interval", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", type=Path)
    parser.add_argument("metrics", type=Path, nargs="+", help="a file per run")
    parser.add_argument("--windows", type=int, default=10)
    parser.add_argument("--control-hz", type=float, default=Suite.control_hz, help="control steps per second")
    chosen = parser.parse_args()
    runs = {str(file): read(file) for file in chosen.metrics}
    shortest = min(runs, key=lambda name: len(runs[name].ends))
    if chosen.windows > (rounds := len(runs[shortest].ends)):
        sys.exit(f"{shortest} has {rounds} rounds: give at most --windows {rounds}")
    draw(chosen.figure, list(runs.values()), chosen.windows, chosen.control_hz)
    sys.stdout.write(table(runs, chosen.control_hz))


if __name__ == "__main__":
    main()
