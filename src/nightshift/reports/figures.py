"""Figures: the evaluation of all candidates beside their training, and learning curves over several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from numpy.typing import NDArray

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from nightshift.reports import tables
from nightshift.reports.candidates import Candidate
from nightshift.reports.history import KL, SAMPLED_SUCCESS, History
from nightshift.statistics.intervals import over_runs

_COLOURS = ("#c3c9d1", "#0072b2", "#e69f00", "#009e73", "#cc79a7")
_HATCHES = ("", "", "//", "..", "xx", "\\\\")
"""By place among the candidates. Okabe and Ito's colours are told apart by colour-blind readers; hatches by readers of
a grey print."""
_SAMPLED = "#0072b2"
_GREEDY = "#d55e00"
_KL = "#8a8a8a"
_INTERVENED = "#009e73"
_KL_HEADROOM = 3
"""KL stays in the lower third of its axis, below the success curves."""
_BARS_WIDTH = 7.2
_CURVE_WIDTH = 5.6
_HELP_WIDTH = 3.8
_WIDEST_BAR = 0.3
_NUMBER_BOX = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
"""Behind the number on a bar, which may be dark or hatched."""
_LIMIT = "#a3262a"


def evaluation(path: Path, report: Mapping[str, Any], candidates: Sequence[Candidate]) -> None:
    """Success per task and overall with 95 % intervals, beside the training of every candidate that has a history, and
    how much it was helped where somebody could take over."""
    trained = [(candidate.label, candidate.history) for candidate in candidates if candidate.history]
    helped = [(label, history) for label, history in trained if history.interventions()]
    widths = [_BARS_WIDTH, *(_CURVE_WIDTH for _ in trained), *(_HELP_WIDTH for _ in helped)]
    figure = plt.figure(figsize=(sum(widths), 4.8), layout="constrained")
    grid = figure.add_gridspec(1, len(widths), width_ratios=widths)
    bars, *places = (grid[0, column] for column in range(len(widths)))
    _bars(figure.add_subplot(bars), report)
    for place, (label, history) in zip(places, trained, strict=False):
        _training(figure.add_subplot(place), label, history)
    for place, (label, history) in zip(places[len(trained) :], helped, strict=True):
        rows = place.subgridspec(len(history.interventions()), 1)
        _interventions([figure.add_subplot(rows[row, 0]) for row in range(rows.nrows)], label, history)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def curves(path: Path, groups: Mapping[str, NDArray[np.float64]]) -> None:
    """Sampled success during training, by name [runs, iterations]: the mean and its 95 % interval over runs."""
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for name, scores in groups.items():
        iterations = np.arange(1, scores.shape[1] + 1)
        low, high = np.array([over_runs(runs) for runs in scores.T.tolist()]).T
        (line,) = axes.plot(iterations, scores.mean(axis=0), label=name)
        axes.fill_between(iterations, low, high, color=line.get_color(), alpha=0.18, linewidth=0)
    axes.set(xlabel="iteration", title="Sampled success during training, 95 % intervals over runs")
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    _show_success(axes)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _show_success(axes: Axes) -> None:
    """The vertical axis is a success rate."""
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    axes.spines[["top", "right"]].set_visible(False)


def _bars(axes: Axes, report: Mapping[str, Any]) -> None:
    results = report["candidates"]
    parts = list(tables.parts(results[0]))
    names = ["overall", *parts] if len(parts) > 1 else parts
    width = min(0.8 / len(results), _WIDEST_BAR)
    for place, result in enumerate(results):
        rates = [result["overall"] if name == "overall" else tables.parts(result)[name] for name in names]
        heights = np.array([r["rate"] for r in rates])
        errors = np.array([[r["rate"] - r["low"], r["high"] - r["rate"]] for r in rates]).T.clip(0)
        bars = axes.bar(
            np.arange(len(names)) + (place - (len(results) - 1) / 2) * width,
            heights,
            width * 0.92,
            yerr=errors,
            capsize=3,
            color=_COLOURS[place % len(_COLOURS)],
            hatch=_HATCHES[place % len(_HATCHES)],
            edgecolor="white",
            label=f"after {result['label']}{' (the same policy)' if tables.same_policy_as(result) else ''}",
        )
        numbers = [f"{100 * height:.0f}" for height in heights]
        axes.bar_label(bars, numbers, label_type="center", fontsize=8, bbox=_NUMBER_BOX)
    axes.set_xticks(np.arange(len(names)), [name.replace("_", " ") for name in names], rotation=15, ha="right")
    axes.set(
        ylabel="success", title=f"Held-out init states, {report['grid']['episodes']} episodes each, 95 % intervals"
    )
    axes.set_xlim(-0.6, len(names) - 0.4)
    _show_success(axes)
    _legend_below(axes, *axes.get_legend_handles_labels(), columns=4)


def _training(axes: Axes, label: str, history: History) -> None:
    """Sampled and greedy success with the iteration that was kept; KL on an axis of its own."""
    _show_success(axes)
    sampled = history.metric(SAMPLED_SUCCESS)
    kl = {iteration: value for iteration, value in history.metric(KL).items() if np.isfinite(value)}  # it may overflow
    axes.plot(list(sampled), list(sampled.values()), "o-", color=_SAMPLED, markersize=4, label="sampled, training")
    if history.validation:
        rates = history.validation.values()
        errors = np.array([[rate.rate - rate.low, rate.high - rate.rate] for rate in rates]).T.clip(0)
        axes.errorbar(
            list(history.validation),
            [rate.rate for rate in rates],
            yerr=errors,
            fmt="D--",
            color=_GREEDY,
            capsize=3,
            label="greedy, validation",
        )
    axes.axvline(history.kept, color="black", linestyle=":", zorder=0, label=f"kept: iteration {history.kept}")
    axes.set(
        xlabel="iteration", ylabel="success", title=f"{label}: training", xlim=(-0.5, len(history.iterations) + 0.5)
    )
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    handles, labels = axes.get_legend_handles_labels()
    if kl:
        distance = axes.twinx()
        distance.plot(list(kl), list(kl.values()), "-", color=_KL, linewidth=1, label="KL per iteration (right)")
        distance.set_ylim(0, _KL_HEADROOM * max(*kl.values(), history.kl_limit or 0.0, 1e-6))
        distance.set_ylabel("KL per iteration (nats)")
        if history.kl_limit is not None:
            limit = f"KL limit {history.kl_limit:g} (right)"
            distance.axhline(history.kl_limit, color=_LIMIT, linestyle="-.", linewidth=1, label=limit)
        distance.spines[["top"]].set_visible(False)
        more = distance.get_legend_handles_labels()
        handles, labels = handles + more[0], labels + more[1]
    _legend_below(axes, handles, labels, columns=2)


def _interventions(panels: Sequence[Axes], label: str, history: History) -> None:
    """How often and how long somebody took over, by iteration, and how long the policy acted in between."""
    for axes, (words, values) in zip(panels, history.interventions().items(), strict=True):
        axes.plot(list(values), list(values.values()), "o-", color=_INTERVENED, markersize=3)
        axes.set_title(f"{label}: {words}", fontsize=9, loc="left")
        axes.set(ylim=(0, None), xlim=(-0.5, len(history.iterations) + 0.5))
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
        axes.tick_params(labelbottom=axes is panels[-1])
    panels[-1].set_xlabel("iteration")


def _legend_below(axes: Axes, handles: Sequence[Any], labels: Sequence[str], *, columns: int) -> None:
    """Under the panel, where no bar or curve can be hidden by it."""
    axes.legend(handles, labels, frameon=False, ncols=columns, loc="upper center", bbox_to_anchor=(0.5, -0.16))
