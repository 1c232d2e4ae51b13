"""The evaluation of a success classifier: its confusion table, and a contact sheet of examples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from numpy.typing import NDArray

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from nightshift import files
from nightshift.rewards.training import Judged, confusion
from nightshift.statistics.classification import Confusion
from nightshift.statistics.intervals import Rate

REPORT = "classifier.json"
TABLE = "confusion.md"
SHEET = "examples.png"
OVERALL = "overall"
_COLUMNS = 8
_CELL = 1.5
_TITLE = 0.55
"""Inches."""
_KINDS = (
    ("false positives", "rewarded without success", (False, True)),
    ("false negatives", "success without reward", (True, False)),
    ("true positives", "rewarded success", (True, True)),
    ("true negatives", "no success, no reward", (False, False)),
)
"""Of the sheet, from top to bottom: name, meaning, whether the task was solved, whether the classifier says so."""


def by_task(judged: Sequence[Judged], threshold: float) -> dict[str, Confusion]:
    """Overall, and of every task if there are several."""
    tasks = sorted({one.segment.task for one in judged})
    own = {task: [one for one in judged if one.segment.task == task] for task in tasks}
    found = {OVERALL: confusion(judged, threshold)}
    return found | ({task: confusion(cases, threshold) for task, cases in own.items()} if len(tasks) > 1 else {})


def write(
    folder: Path, judged: Sequence[Judged], cameras: Sequence[str], facts: dict[str, Any]
) -> dict[str, Confusion]:
    """Numbers, table and pictures as one folder; `facts` has the threshold, and what else identifies the classifier."""
    threshold = float(facts["threshold"])
    tables = by_task(judged, threshold)
    with files.new_folder(folder) as new:
        numbers = {name: table.to_json() for name, table in tables.items()}
        files.write_json(new / REPORT, {**facts, "confusion": numbers})
        (new / TABLE).write_text(markdown(tables))
        contact_sheet(new / SHEET, judged, cameras, threshold)
    return tables


def markdown(tables: dict[str, Confusion]) -> str:
    rows = [
        "| | true positives | false negatives | false positives | true negatives | precision | recall |",
        "|---|---|---|---|---|---|---|",
    ]
    rows += [
        f"| {name} | {one.true_positives} | {one.false_negatives} | {one.false_positives} | {one.true_negatives} "
        f"| {words(one.precision)} | {words(one.recall)} |"
        for name, one in tables.items()
    ]
    return "\n".join(rows) + "\n"


def words(rate: Rate | None) -> str:
    return "–" if rate is None else f"{rate.rate:.0%} ({rate.low:.0%} to {rate.high:.0%})"


def contact_sheet(path: Path, judged: Sequence[Judged], cameras: Sequence[str], threshold: float) -> None:
    """A row per kind of verdict, with the frame of each segment that looks most like success.

    Mistakes begin with the worst, right verdicts with the closest.
    """
    rows = [(name, meaning, _sorted(judged, threshold, kind)) for name, meaning, kind in _KINDS]
    heights = [_CELL + _TITLE if found else _TITLE for _, _, found in rows]
    figure = plt.figure(figsize=(_COLUMNS * _CELL * len(cameras), sum(heights) + _TITLE), layout="constrained")
    grid = figure.add_gridspec(len(rows), 1, height_ratios=heights)
    for place, (name, meaning, found) in enumerate(rows):
        part = figure.add_subfigure(grid[place])
        part.suptitle(f"{name}: {len(found)} ({meaning})", x=0.005, ha="left", fontsize=10, fontweight="bold")
        if found:
            _row(part.subplots(1, _COLUMNS), found, cameras)
    figure.suptitle(
        f"Success classifier, threshold {threshold:.3f}: worst mistakes and closest calls first", fontsize=11
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _sorted(judged: Sequence[Judged], threshold: float, kind: tuple[bool, bool]) -> list[Judged]:
    """Of one kind: mistakes by how far they are from the threshold, right verdicts by how near."""
    success, rewarded = kind
    found = [one for one in judged if one.segment.success == success and (one.score >= threshold) == rewarded]
    return sorted(found, key=lambda one: abs(one.score - threshold), reverse=success != rewarded)


def _row(cells: Sequence[Axes], found: Sequence[Judged], cameras: Sequence[str]) -> None:
    for axes in cells:
        axes.set_axis_off()
    for axes, one in zip(cells, found, strict=False):
        axes.imshow(picture(one, cameras))
        place = f"frame {one.frame + 1} of {one.segment.episode.length}"
        axes.set_title(f"{one.segment.task.replace('_', ' ')}\n{one.score:.3f}  {place}", fontsize=7, loc="left")


def picture(one: Judged, cameras: Sequence[str]) -> NDArray[np.uint8]:
    """What the cameras saw, side by side."""
    seen = one.segment.observe(cameras, [one.frame])
    return np.concatenate([seen[camera][0] for camera in cameras], axis=1)
