"""The rules of the gate: which candidate of an evaluation is registered, and whether it becomes champion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nightshift.errors import RolloutError
from nightshift.statistics.intervals import Rate
from nightshift.statistics.paired import Cell, EpisodeOutcome, Paired, solved


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
class Decision:
    promote: bool
    """Whether the version becomes champion."""
    reason: str
    """One sentence with the numbers that decided."""
    p_value: float | None
    """That the version is better than the champion, one-sided; None where no test was made."""


def no_champion(version: str, rate: Rate) -> Decision:
    reason = f"{version} becomes champion: there was none, and it solved {rate.successes} of {rate.episodes} states"
    return Decision(promote=True, reason=reason, p_value=None)


def same_weights(version: str, rate: Rate) -> Decision:
    reason = (
        f"{version} stays champion: the best candidate of this evaluation, which solved {rate.successes} of "
        f"{rate.episodes} states, has the same weights"
    )
    return Decision(promote=False, reason=reason, p_value=None)


def other_grid(version: str, champion: str, rate: Rate) -> Decision:
    reason = (
        f"{version} stays challenger: it solved {rate.successes} of {rate.episodes} states, but {champion} was not "
        "evaluated on this grid of init states, so it cannot be told whether it is better"
    )
    return Decision(promote=False, reason=reason, p_value=None)


def compare(version: str, champion: str, pair: Paired, level: float) -> Decision:
    """A version becomes champion if the paired test says at this level that it is better than the champion."""
    numbers = (
        f"of {pair.states} states valid for both it solved {pair.won} that {champion} failed "
        f"and failed {pair.lost} that {champion} solved (exact p = {pair.p_value:.3g}, level {level:g})"
    )
    promote = pair.p_value <= level
    if promote:
        verdict = "becomes champion"
    elif pair.swapped.p_value <= level:
        verdict = f"stays challenger, since it is worse than {champion}"
    else:
        verdict = f"stays challenger, since it cannot be told whether it is better than {champion}"
    return Decision(promote=promote, reason=f"{version} {verdict}: {numbers}", p_value=pair.p_value)
