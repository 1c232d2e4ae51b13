"""The rules of the gate: which candidate of an evaluation is registered, and whether it becomes champion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from nightshift.errors import RolloutError
from nightshift.project.robustness_grid import UNPERTURBED
from nightshift.statistics.intervals import Rate
from nightshift.statistics.paired import Cell, EpisodeOutcome, Paired, by_task, solved


def common_rates(outcomes: Mapping[str, Sequence[EpisodeOutcome]]) -> dict[str, Rate]:
    """Success of every candidate on the init states on which all of them had a valid episode."""
    by_cell = {name: solved(episodes) for name, episodes in outcomes.items()}
    common: set[Cell] = set.intersection(*(set(cells) for cells in by_cell.values()))
    if not common:
        raise RolloutError(
            "on no init state did all candidates have a valid episode, so they cannot be compared",
            "run again: invalid episodes are played again",
        )
    return {name: Rate(sum(cells[cell] for cell in common), len(common)) for name, cells in by_cell.items()}


def best(rates: Mapping[str, Rate]) -> str:
    """The candidate that solves most states; of equals the earlier one, which took less training."""
    return max(rates, key=lambda name: rates[name].successes)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the gate asks of a version; the section `register` of params.yaml."""

    level: float
    """One-sided p of the paired test at which it counts as better than the champion."""
    min_success_rate: float
    """Success rate below which no version becomes champion, even if there is none."""
    max_task_drop: float
    """How much lower than the champion's its success rate on any task may be."""
    max_perturbation_drop: float | None = None
    """The same under any perturbation; None: perturbations do not count."""


@dataclass(frozen=True, kw_only=True)
class Robustness:
    """Two policies on the same perturbed episodes, as `nightshift robustness --against` compared them."""

    ours: str
    """sha256 of the weights; `theirs` likewise."""
    theirs: str
    gains: Mapping[str, float]
    """Difference of the success rates by perturbation, over all its strengths."""

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> Robustness | None:
        """From the report of the command; None if it compared nothing under a perturbation."""
        compared = (report["against"] or {}).get("perturbations", {})
        gains = {name: row["overall"]["gain"] for name, row in compared.items() if name != UNPERTURBED}
        if not gains:
            return None
        ours, theirs = (policy["weights"] for policy in report["policies"])
        return cls(ours=ours, theirs=theirs, gains=gains)

    def fallen(self, margin: float) -> dict[str, float]:
        """By how much it is lower, under the perturbations where that is more than the margin."""
        return {name: -gain for name, gain in self.gains.items() if -gain > margin}


class Verdict(StrEnum):
    PROMOTED = "promoted"
    """It becomes champion."""
    CHAMPION_ALREADY = "champion already"
    """It was champion before it was registered again."""
    WORSE = "worse"
    """The paired test finds the champion better."""
    NOT_COMPARED = "not compared"
    """The champion has not played the same grid: a person decides."""
    NOT_PROMOTED = "not promoted"


@dataclass(frozen=True, kw_only=True)
class Decision:
    verdict: Verdict
    reason: str
    """One sentence with the numbers that decided."""
    p_value: float | None
    """That the version is better than the champion, one-sided; None where no test was made."""

    @property
    def promote(self) -> bool:
        """Whether the version becomes champion."""
        return self.verdict is Verdict.PROMOTED


def no_champion(version: str, rate: Rate, rules: Rules) -> Decision:
    if below := _below_the_bar(version, rate, rules):
        return below
    reason = f"{version} becomes champion: there was none, and it solved {rate.successes} of {rate.episodes} states"
    return Decision(verdict=Verdict.PROMOTED, reason=reason, p_value=None)


def same_weights(version: str, rate: Rate) -> Decision:
    reason = (
        f"{version} stays champion: the best candidate of this evaluation, which solved {rate.successes} of "
        f"{rate.episodes} states, has the same weights"
    )
    return Decision(verdict=Verdict.CHAMPION_ALREADY, reason=reason, p_value=None)


def older(version: str, newest: str) -> Decision:
    """Code or data of the past made a version of the past again."""
    reason = f"{version} was registered before {newest}: only nightshift promote moves an alias to an older version"
    return Decision(verdict=Verdict.NOT_PROMOTED, reason=reason, p_value=None)


def withdrawn(version: str, when: str) -> Decision:
    reason = (
        f"{version} stays challenger: it was withdrawn by hand on {when}, so only nightshift promote brings it back"
    )
    return Decision(verdict=Verdict.NOT_PROMOTED, reason=reason, p_value=None)


def not_compared(version: str, champion: str, rate: Rate, rules: Rules, *, number: str, why: str) -> Decision:
    """`number` of the version; `why` the champion cannot play this grid, empty if it merely has not."""
    if below := _below_the_bar(version, rate, rules):
        return below
    if why:
        lacks, remedy = f"cannot play this grid ({why})", f"nightshift promote {number} makes it champion"
    else:
        lacks = "was not evaluated on this grid of init states by this code"
        remedy = "nightshift run --force-stage evaluate lets both play it"
    reason = (
        f"{version} stays challenger: it solved {rate.successes} of {rate.episodes} states, but {champion} {lacks}, "
        f"so it cannot be told whether it is better; {remedy}"
    )
    return Decision(verdict=Verdict.NOT_COMPARED, reason=reason, p_value=None)


def compare(
    version: str, champion: str, ours: Mapping[Cell, bool], theirs: Mapping[Cell, bool], rules: Rules
) -> Decision:
    """A version becomes champion if it is good enough, lower on no task by more than the margin, and better by the
    paired test."""
    pair = Paired.between(ours, theirs)
    worse = pair.swapped.p_value <= rules.level
    if below := _below_the_bar(version, Rate(sum(ours.values()), len(ours)), rules):
        return replace(below, verdict=Verdict.WORSE) if worse else below
    numbers = (
        f"of {pair.states} states valid for both it solved {pair.won} that {champion} failed "
        f"and failed {pair.lost} that {champion} solved (exact p = {pair.p_value:.3g}, level {rules.level:g})"
    )
    fallen = _fallen(by_task(ours, theirs), rules.max_task_drop)
    better = pair.p_value <= rules.level
    verdict = Verdict.NOT_PROMOTED
    if better and not fallen:
        verdict, words = Verdict.PROMOTED, "becomes champion"
    elif better:
        words = f"stays challenger, since it is lower than {champion} {fallen}, although better over all tasks"
    elif worse:
        verdict, words = Verdict.WORSE, f"stays challenger, since it is worse than {champion}"
    else:
        words = f"stays challenger, since it cannot be told whether it is better than {champion}"
    return Decision(verdict=verdict, reason=f"{version} {words}: {numbers}", p_value=pair.p_value)


def robust(decision: Decision, version: str, champion: str, found: Robustness | None, margin: float) -> Decision:
    """A promotion stands if the version is lower than the champion under no perturbation by more than the margin.

    `found` compares these two on the grid of params.yaml; None: they have not been compared on it.
    """
    if not decision.promote:
        return decision
    if found is None:
        reason = (
            f"{version} stays challenger: it is better than {champion}, but they have not been compared under "
            "the perturbations of params.yaml (nightshift robustness challenger --against champion, then nightshift "
            "run --force-stage register)"
        )
        return replace(decision, verdict=Verdict.NOT_PROMOTED, reason=reason)
    if fallen := found.fallen(margin):
        words = ", ".join(f"{100 * drop:.1f} points under {name}" for name, drop in fallen.items())
        reason = (
            f"{version} stays challenger, since it is lower than {champion} by {words} (margin {100 * margin:g}), "
            "although better without perturbations"
        )
        return replace(decision, verdict=Verdict.NOT_PROMOTED, reason=reason)
    return decision


def _below_the_bar(version: str, rate: Rate, rules: Rules) -> Decision | None:
    """A policy that solves nothing is no champion, whatever the bar is."""
    if rate.successes and rate.rate >= rules.min_success_rate:
        return None
    reason = (
        f"{version} stays challenger: it solved {rate.successes} of {rate.episodes} states, and a champion solves at "
        f"least {100 * rules.min_success_rate:g} %"
    )
    return Decision(verdict=Verdict.NOT_PROMOTED, reason=reason, p_value=None)


def _fallen(tasks: Mapping[str, Paired], margin: float) -> str:
    """The tasks whose rate is lower by more than the margin, in words; empty if there are none."""
    lower = {task: -pair.gain for task, pair in tasks.items() if -pair.gain > margin}
    words = ", ".join(f"{100 * drop:.1f} points on {task}" for task, drop in lower.items())
    return f"by {words} (margin {100 * margin:g})" if words else ""
