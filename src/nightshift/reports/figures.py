"""Pictures of a run: the evaluation with its intervals, the learning curve, film strips; of several runs: curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from numpy.typing import NDArray
from PIL import Image

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from nightshift.reports.intervals import over_runs

COLOURS = {"sft": "#9aa5b1", "rloo": "#2563eb"}
LABELS = {"sft": "after SFT", "rloo": "after RLOO"}
_FILM_MILLISECONDS = 120


def evaluation(path: Path, report: Mapping[str, Any], history: Sequence[Mapping[str, float]]) -> None:
    """Success per task and overall with 95 % intervals, beside the course of the training."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2), width_ratios=(3, 2), layout="constrained")
    _bars(left, report)
    _curve(right, history)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def curves(path: Path, groups: Mapping[str, NDArray[np.float64]]) -> None:
    """Success while training, by name [runs, iterations]: the mean and its 95 % interval over runs."""
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for name, scores in groups.items():
        iterations = np.arange(1, scores.shape[1] + 1)
        low, high = np.array([over_runs(runs) for runs in scores.T.tolist()]).T
        (line,) = axes.plot(iterations, scores.mean(axis=0), label=name)
        axes.fill_between(iterations, low, high, color=line.get_color(), alpha=0.18, linewidth=0)
    axes.set(ylim=(0, 1.02), xlabel="iteration", title="Success of training episodes, 95 % intervals over runs")
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def film(folder: Path, task: str, frames: NDArray[np.uint8], strip_frames: int) -> None:
    """A short moving picture and a strip of `strip_frames` stills, from frames [F, H, W, 3]."""
    pictures = [Image.fromarray(frame) for frame in frames]
    pictures[0].save(
        folder / f"{task}.gif", save_all=True, append_images=pictures[1:], duration=_FILM_MILLISECONDS, loop=0
    )
    chosen = np.linspace(0, len(frames) - 1, strip_frames).round().astype(int)
    Image.fromarray(np.concatenate(frames[chosen], axis=1)).save(folder / f"{task}.png")


def _bars(axes: Axes, report: Mapping[str, Any]) -> None:
    policies = report["policies"]
    tasks = list(next(iter(policies.values()))["tasks"])
    names = ["overall", *tasks] if len(tasks) > 1 else tasks
    width = 0.8 / len(policies)
    for offset, (policy, result) in enumerate(policies.items()):
        rates = [result["overall"] if name == "overall" else result["tasks"][name] for name in names]
        heights = np.array([r["rate"] for r in rates])
        errors = np.array([[r["rate"] - r["low"], r["high"] - r["rate"]] for r in rates]).T.clip(0)
        places = np.arange(len(names)) + (offset - (len(policies) - 1) / 2) * width
        axes.bar(places, heights, width * 0.92, yerr=errors, capsize=3, color=COLOURS[policy], label=LABELS[policy])
    axes.set_xticks(np.arange(len(names)), [name.replace("_", " ") for name in names], rotation=15, ha="right")
    axes.set(
        ylim=(0, 1.02),
        ylabel="success",
        title=f"Held-out init states, {report['grid']['episodes']} episodes each, 95 % intervals",
    )
    axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def _curve(axes: Axes, history: Sequence[Mapping[str, float]]) -> None:
    iterations = np.arange(1, len(history) + 1)
    axes.plot(
        iterations,
        [h["rollout/success"] for h in history],
        "o-",
        color=COLOURS["rloo"],
        label="success of training episodes",
    )
    axes.set(ylim=(0, 1.02), xlabel="RLOO iteration", title="Training")
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    distance = axes.twinx()
    distance.plot(
        iterations, [h["update/kl"] for h in history], "s--", color="#f59e0b", markersize=3, label="KL per iteration"
    )
    distance.set_ylim(bottom=0)
    handles = [*axes.get_lines(), *distance.get_lines()]
    axes.legend(handles, [str(line.get_label()) for line in handles], frameon=False, loc="lower right")
    axes.spines[["top"]].set_visible(False)
    distance.spines[["top"]].set_visible(False)
