"""Success under perturbations: rates by perturbation, strength and task, two policies paired, and what to film."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nightshift.errors import RolloutError
from nightshift.project.robustness_grid import UNPERTURBED
from nightshift.statistics.intervals import Rate
from nightshift.statistics.paired import Cell, EpisodeOutcome, Paired, Repeated, solved


class PerturbedOutcome(EpisodeOutcome):
    """One episode of a robustness grid."""

    perturbation: str
    strength: float
    reached: float
    """The strength that the scene had room for."""


class GridCell(NamedTuple):
    perturbation: str
    strength: float


Outcomes = Sequence[PerturbedOutcome]

NO_RATE = {"successes": 0, "episodes": 0, "rate": None, "low": None, "high": None}
"""Of a cell without a valid episode."""

_NAME_THE_OTHERS = "name the others in robustness.perturbations: finished episodes are not played again"


def by_cell(outcomes: Outcomes) -> dict[GridCell, list[PerturbedOutcome]]:
    found: dict[GridCell, list[PerturbedOutcome]] = {}
    for outcome in outcomes:
        found.setdefault(GridCell(outcome["perturbation"], outcome["strength"]), []).append(outcome)
    return found


def summary(outcomes: Outcomes) -> dict[str, Any]:
    """Rates with intervals: without a perturbation, and by perturbation for every strength, overall and by task.

    A rate is None where no episode was valid. RolloutError if that is so for a whole perturbation, or without one.
    """
    cells = by_cell(outcomes)
    curves: dict[str, list[dict[str, Any]]] = {}
    for cell, episodes in cells.items():
        curves.setdefault(cell.perturbation, []).append({"strength": cell.strength, **_rates(episodes)})
    broken = [name for name, found in curves.items() if not any(cell["overall"]["episodes"] for cell in found)]
    if broken:
        raise _nothing_valid(broken)
    del curves[UNPERTURBED]
    return {
        "unperturbed": _rates(cells[GridCell(UNPERTURBED, 0.0)]),
        "perturbations": curves,
        "invalid": sum(not one["valid"] for one in outcomes),
    }


def _nothing_valid(names: Sequence[str]) -> RolloutError:
    """The worlds are the same every time, so another try alone may well end as this one."""
    without = "" if UNPERTURBED in names else f", or {_NAME_THE_OTHERS}"
    return RolloutError(
        f"the simulator failed in every episode {_under(*names)}",
        f"the warnings above say why; if there are none, machine.workers 0 in params.yaml shows them{without}",
    )


def _nothing_in_common(name: str) -> RolloutError:
    others = "" if name == UNPERTURBED else f", or {_NAME_THE_OTHERS}"
    return RolloutError(
        f"on no init state did both policies have a valid episode {_under(name)}",
        f"play what the simulator failed on again, as docs/robustness.md says{others}",
    )


def _under(*names: str) -> str:
    calm = ["without a perturbation"] if UNPERTURBED in names else []
    perturbed = ", ".join(name for name in names if name != UNPERTURBED)
    return " and ".join([*calm, *([f"under {perturbed}"] if perturbed else [])])


def _rates(episodes: Outcomes) -> dict[str, Any]:
    tasks = dict.fromkeys(one["task"] for one in episodes)
    return {
        "overall": _rate(episodes),
        "tasks": {task: _rate([one for one in episodes if one["task"] == task]) for task in tasks},
    }


def _rate(episodes: Outcomes) -> Mapping[str, float | int | None]:
    valid = [one["success"] for one in episodes if one["valid"]]
    return Rate(sum(valid), len(valid)).to_json() if valid else NO_RATE


def limited(outcomes: Outcomes) -> dict[str, dict[str, int]]:
    """By perturbation and task: episodes whose scene had no room for the whole strength, or nothing to change."""
    found: dict[str, dict[str, int]] = {}
    for one in outcomes:
        if one["reached"] < one["strength"]:
            counts = found.setdefault(one["perturbation"], {})
            counts[one["task"]] = counts.get(one["task"], 0) + 1
    return found


def limits(report: Mapping[str, Any]) -> list[str]:
    """A sentence for each perturbation that a scene was too full for, or had nothing for."""
    return [
        f"{name}: the scene did not allow the whole strength in "
        + ", ".join(f"{count} {'episode' if count == 1 else 'episodes'} of {task}" for task, count in counts.items())
        for name, counts in report.get("limited", {}).items()  # reports of earlier releases do not say it
    ]


def comparison(ours: Outcomes, theirs: Outcomes) -> dict[str, Any]:
    """One policy against another, paired by init state: by perturbation over all strengths, and for each of them.

    RolloutError if under a perturbation they have no state in common: the gate would take it for a draw.
    """
    mine, other = by_cell(ours), by_cell(theirs)
    pairs = {cell: (solved(mine[cell]), solved(other[cell])) for cell in mine if cell in other}
    found: dict[str, Any] = {}
    for name in dict.fromkeys(cell.perturbation for cell in pairs):
        own = {cell.strength: pair for cell, pair in pairs.items() if cell.perturbation == name}
        rows = [{"strength": strength, **Paired.between(*pair).to_json()} for strength, pair in own.items()]
        overall = Repeated.between(list(own.values())).to_json()
        if not overall["states"]:
            raise _nothing_in_common(name)
        found[name] = {"overall": overall, "strengths": rows}
    return found


def compared(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rows of a comparison, the unperturbed one first: names are sorted in a report that was read."""
    rows = report["against"]["perturbations"]
    return {"unperturbed": rows[UNPERTURBED], **{name: row for name, row in rows.items() if name != UNPERTURBED}}


def typical_failures(outcomes: Outcomes, count: int) -> list[PerturbedOutcome]:
    """An episode to film of each of the `count` perturbations under which most is lost.

    Of the weakest strength that fails half as often as the one that fails most, on a state that is solved without the
    perturbation: what is on the film is then due to it.
    """
    cells = by_cell(outcomes)
    calm = solved(cells[GridCell(UNPERTURBED, 0.0)])
    found: dict[str, list[PerturbedOutcome]] = {}
    for cell, episodes in cells.items():
        lost = [one for one in episodes if one["valid"] and not one["success"] and calm.get(_state(one))]
        if cell.perturbation != UNPERTURBED and lost:
            found.setdefault(cell.perturbation, []).extend(lost)
    worst = sorted(found, key=lambda name: -len(found[name]))[:count]
    return [_typical(found[name]) for name in worst]


def _typical(lost: Sequence[PerturbedOutcome]) -> PerturbedOutcome:
    strengths = sorted({one["strength"] for one in lost})
    counts = {strength: sum(one["strength"] == strength for one in lost) for strength in strengths}
    chosen = next(strength for strength in strengths if 2 * counts[strength] >= max(counts.values()))
    return next(one for one in lost if one["strength"] == chosen)


def _state(outcome: EpisodeOutcome) -> Cell:
    return outcome["task"], outcome["init_state"]
