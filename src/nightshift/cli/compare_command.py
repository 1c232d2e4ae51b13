"""`nightshift compare`: two versions or runs, state by state where they have played a common grid."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from nightshift.cli.commands import enter
from nightshift.cli.model_commands import ALIASES, SHORT_ID, model_name, new_table, result_cells, split_name
from nightshift.errors import RegistryError
from nightshift.pipeline import results, summary
from nightshift.telemetry.console import console

if TYPE_CHECKING:
    from nightshift.adapters.evaluated import Evaluated, Grid
    from nightshift.statistics.intervals import Rate
    from nightshift.statistics.paired import Cell


def compare(one: str, other: str) -> None:
    """Both with their results, how they compare, and what differs in how they were made."""
    from nightshift.adapters import evaluated
    from nightshift.adapters.mlflow_tracking import changes

    root = enter()
    first, second = _find(root, one), _find(root, other)
    grid = evaluated.common_grid(first, second)
    _print_sides(first, second, grid)
    if grid:
        console.print(f"{first.title} against {second.title} on the same grid:", markup=False)
        _print_pairs(first.grids[grid], second.grids[grid])
    else:
        _print_unpaired(first, second)
    changed = changes(second.params, first.params)
    console.print(Text(f"params of {first.title} that differ: {', '.join(changed) or 'none'}", style="dim"))


def _find(root: Path, what: str) -> Evaluated:
    """A version by number or alias, a run by its id or name, or the champion of a model of this name."""
    from nightshift.adapters import evaluated, model_versions

    name, which = split_name(what, model_name(root))
    if not _may_be_a_run(what):
        return evaluated.version(root, model_versions.find(root, name, which))
    if model_versions.matching_runs(root, what):
        return evaluated.run(root, model_versions.find_run(root, what))
    try:
        return evaluated.version(root, model_versions.find(root, name, which))
    except RegistryError:
        raise RegistryError(
            f"there is no version, run or model {what!r}", "nightshift models and nightshift runs show what there is"
        ) from None


def _may_be_a_run(what: str) -> bool:
    """A few digits are a version; eight may be the beginning of an id."""
    is_number = what.isdigit() and len(what) < SHORT_ID
    return not is_number and what not in ALIASES and not any(separator in what for separator in "@/")


def _print_sides(first: Evaluated, second: Evaluated, grid: Grid | None) -> None:
    table = new_table("", "made by", "success", "95 % interval", "states", "dataset", "code")
    for side in (first, second):
        title = f"{side.title}{' ★' if side.is_champion else ''}"
        rate = _rate(side.grids[grid] if grid else side.newest)
        table.add_row(title, side.candidate, *result_cells(rate), side.dataset[:SHORT_ID], side.commit)
    console.print(table)


def _print_pairs(ours: Mapping[Cell, bool], theirs: Mapping[Cell, bool]) -> None:
    """On the states valid for both, over all tasks and task by task."""
    from nightshift.statistics.paired import Paired, by_task

    table = new_table("same states", "states", "won", "lost", "points", "95 % interval", "exact p")
    tasks = by_task(ours, theirs)
    for title, pair in {"all": Paired.between(ours, theirs), **(tasks if len(tasks) > 1 else {})}.items():
        counts = (str(pair.states), str(pair.won), str(pair.lost))
        interval = results.interval(*pair.interval, sign="+")
        table.add_row(title, *counts, f"{100 * pair.gain:+.1f}", interval, summary.p_value(pair.p_value))
    console.print(table)


def _print_unpaired(first: Evaluated, second: Evaluated) -> None:
    """Differences of rates on different states or under different conditions, and what these are."""
    from nightshift.adapters import evaluated
    from nightshift.statistics.intervals import of_difference

    if evaluated.played_by_other_code(first, second):
        why = "since their episodes on the same grid were played by other code of simulators or rollouts"
    else:
        differ = evaluated.differing_conditions(first, second)
        why = f"since they have not played the same grid of init states{': ' if differ else ''}{', '.join(differ)}"
    console.print(f"not compared state by state, {why}", style="yellow", markup=False)
    if not first.newest or not second.newest:
        return
    table = new_table("unpaired", first.title, second.title, "points", "95 % interval")
    for title in ("all", *_common_tasks(first.newest, second.newest)):
        ours, theirs = (_of_task(side.newest, title) for side in (first, second))
        points = f"{100 * (ours.rate - theirs.rate):+.1f}"
        interval = results.interval(*of_difference(ours, theirs), sign="+")
        table.add_row(title, result_cells(ours)[0], result_cells(theirs)[0], points, interval)
    console.print(table)


def _common_tasks(ours: Mapping[Cell, bool], theirs: Mapping[Cell, bool]) -> list[str]:
    """None where each has one and it is the same: the row of all tasks says it."""
    tasks = [dict.fromkeys(task for task, _ in cells) for cells in (ours, theirs)]
    common = [task for task in tasks[0] if task in tasks[1]]
    return common if max(map(len, tasks)) > 1 else []


def _of_task(cells: Mapping[Cell, bool], task: str) -> Rate:
    return _counted([won for (name, _), won in cells.items() if task in ("all", name)])


def _rate(cells: Mapping[Cell, bool]) -> Rate | None:
    return _counted(list(cells.values())) if cells else None


def _counted(won: list[bool]) -> Rate:
    from nightshift.statistics.intervals import Rate

    return Rate(sum(won), len(won))
