"""The statistics of a set of episodes, drawn: in the terminal and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from nightshift.data.statistics import Distribution, Histogram, Statistics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BAR = 40
_ARM = ("move x", "move y", "move z", "turn x", "turn y", "turn z", "gripper")
"""The actions of LIBERO, robosuite's operational space controller and most datasets of single arms."""
_LEVELS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉"
_COLOUR = "#2563eb"
_MARK = "#f59e0b"


def render(title: str, statistics: Statistics) -> RenderableType:
    """For the terminal."""
    return Group(
        Text.assemble((title, "bold"), f"  {statistics.episodes} episodes, {statistics.steps} steps\n"),
        _facts(statistics),
        *_spread("actions per episode", statistics.lengths),
        *_spread("return", statistics.returns),
        Text("\nactions", style="bold"),
        _actions(statistics),
    )


def draw(path: Path, title: str, statistics: Statistics) -> None:
    """As a picture: lengths and returns above, the dimensions of the actions below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    columns = max(2, min(4, len(statistics.actions)))
    rows = 1 + -(-len(statistics.actions) // columns)
    figure = plt.figure(figsize=(3.2 * columns, 2.6 * rows), layout="constrained")
    figure.suptitle(f"{title}: {statistics.episodes} episodes, {statistics.steps} steps (line: mean)")
    grid = figure.add_gridspec(rows, 2 * columns)
    for place, (name, spread) in enumerate(
        {"actions per episode": statistics.lengths, "return": statistics.returns}.items()
    ):
        axes = figure.add_subplot(grid[0, place * columns : (place + 1) * columns])
        _columns(axes, name, spread.histogram, spread.mean)
        axes.set_ylabel("episodes")
    for number, dimension in enumerate(statistics.actions):
        row, column = divmod(number, columns)
        axes = figure.add_subplot(grid[1 + row, 2 * column : 2 * column + 2])
        _columns(axes, action_names(len(statistics.actions))[number], dimension.histogram, dimension.mean)
        axes.set_ylabel("steps")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def action_names(dimensions: int) -> list[str]:
    """Of an arm's end effector and gripper; numbers for actions that are laid out otherwise."""
    if dimensions == len(_ARM):
        return list(_ARM)
    return [f"action {number}" for number in range(dimensions)]


def bar(share: float, width: int = _BAR) -> str:
    """A bar of eighths of a character: nothing is rounded away, and what is there is seen."""
    eighths = max(round(share * width * 8), 1 if share > 0 else 0)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()


def sparkline(histogram: Histogram) -> str:
    """A character per bin; an empty bin is a gap."""
    top = histogram.counts.max()
    return "".join(_LEVELS[int((count * len(_LEVELS) - 1) // top)] if count else " " for count in histogram.counts)


def _facts(statistics: Statistics) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    table.add_row("tasks", _counted(statistics.tasks))
    table.add_row("from", _counted(statistics.sources))
    table.add_row("succeeded", _share(statistics.successes, statistics.episodes))
    table.add_row("terminated", _share(statistics.terminated, statistics.episodes))
    table.add_row("cut short", _share(statistics.episodes - statistics.terminated, statistics.episodes))
    table.add_row("interventions", f"{_share(statistics.interventions, statistics.steps)} of the steps")
    return table


def _counted(counts: Mapping[str, int]) -> Text:
    return Text("\n".join(f"{name}  {count}" for name, count in counts.items()), overflow="fold")


def _share(count: int, total: int) -> str:
    return f"{count} of {total}  ({100 * count / total:.1f} %)" if total else "0"


def _spread(name: str, spread: Distribution) -> list[RenderableType]:
    numbers = f"  {spread.smallest:g} to {spread.largest:g}, median {spread.median:g}, mean {spread.mean:.4g}"
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    top = spread.histogram.counts.max()
    for label, count in zip(_labels(spread.histogram), spread.histogram.counts, strict=True):
        table.add_row(label, Text(bar(count / top), style="green"), str(count) if count else "")
    return [Text.assemble(("\n" + name, "bold"), (numbers, "dim")), table]


def _labels(histogram: Histogram) -> list[str]:
    """What each bin holds: a number, whole numbers from to, or an interval."""
    edges = histogram.edges
    whole = np.equal(np.mod(edges, 1), 0).all()
    if len(edges) == 2 and edges[0] == edges[1]:  # noqa: PLR2004 - a single value
        return [f"{edges[0]:g}"]
    if whole and edges[1] - edges[0] == 1:
        return [f"{edge:g}" for edge in edges[:-1]]
    if whole:
        return [f"{low:g} – {high - 1:g}" for low, high in pairwise(edges)]
    return [f"{low:.3g} – {high:.3g}" for low, high in pairwise(edges)]


def _actions(statistics: Statistics) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in ("", "min", "mean", "max", "std"):
        table.add_column(column, justify="right")
    table.add_column("min … max")
    for name, dimension in zip(action_names(len(statistics.actions)), statistics.actions, strict=True):
        values = (dimension.smallest, dimension.mean, dimension.largest, dimension.std)
        spark = Text(sparkline(dimension.histogram), style="green")
        table.add_row(name, *(f"{value:.3f}" for value in values), spark)
    return table


def _columns(axes: Axes, name: str, histogram: Histogram, mean: float) -> None:
    if len(histogram.counts) == 1:
        axes.bar(histogram.edges[:1], histogram.counts, 0.1, color=_COLOUR)
        axes.set_xlim(mean - 1, mean + 1)
    else:
        axes.stairs(histogram.counts, histogram.edges, fill=True, color=_COLOUR)
    axes.axvline(mean, color=_MARK, linewidth=1)
    axes.set_title(name, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
