"""Two policies on the same init states: the exact paired test and the interval of the difference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from nightshift.statistics.intervals import CONFIDENCE


class EpisodeOutcome(TypedDict):
    """One episode of an evaluation; it is not valid if the simulator failed."""

    task: str
    init_state: int
    success: bool
    length: int
    valid: bool


Cell = tuple[str, int]
"""Task and init state."""


def solved(outcomes: Sequence[EpisodeOutcome]) -> dict[Cell, bool]:
    """Success by cell of the grid, of valid episodes only."""
    return {(o["task"], o["init_state"]): o["success"] for o in outcomes if o["valid"]}


@dataclass(frozen=True, kw_only=True)
class Paired:
    """A policy against another one on the states where both had a valid episode."""

    states: int
    won: int
    """States that the policy solved and the other failed."""
    lost: int
    """States that the policy failed and the other solved."""

    @classmethod
    def between(cls, ours: Mapping[Cell, bool], theirs: Mapping[Cell, bool]) -> Paired:
        common = ours.keys() & theirs.keys()
        return cls(
            states=len(common),
            won=sum(ours[cell] and not theirs[cell] for cell in common),
            lost=sum(theirs[cell] and not ours[cell] for cell in common),
        )

    @property
    def swapped(self) -> Paired:
        return Paired(states=self.states, won=self.lost, lost=self.won)

    @property
    def gain(self) -> float:
        """Difference of the two success rates."""
        return (self.won - self.lost) / max(self.states, 1)

    @property
    def p_value(self) -> float:
        """One-sided exact McNemar (sign) test of "the policy is better": states that both solved or both failed say
        nothing about it, and the others are fair coin flips if the two policies are equally good."""
        from scipy.stats import binomtest  # takes a second to import, and commands that only show results need none

        discordant = self.won + self.lost
        if discordant == 0:
            return 1.0
        return float(binomtest(self.won, discordant, 0.5, alternative="greater").pvalue)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the gain, by Bonett and Price (2012): Wald after one more state won and one more lost.

        Unlike the conditional exact interval it does not shrink to a point when there are no discordant states.
        """
        return _bonett_price(self.states, self.won, self.lost)

    def to_json(self) -> dict[str, float | int]:
        low, high = self.interval
        return {
            "states": self.states,
            "won": self.won,
            "lost": self.lost,
            "gain": self.gain,
            "low": low,
            "high": high,
            "p_value": self.p_value,
        }


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """A policy against another one on states that both played several times, such as at every strength.

    The episodes of one state are alike, so only its sum is independent of the others.
    """

    times: int
    """How often a state was played at most."""
    differences: Mapping[Cell, Sequence[int]]
    """By state, of the times when both had a valid episode: 1 won, -1 lost, 0 neither."""

    @classmethod
    def between(cls, rounds: Sequence[tuple[Mapping[Cell, bool], Mapping[Cell, bool]]]) -> Repeated:
        found: dict[Cell, list[int]] = {}
        for ours, theirs in rounds:
            for cell in ours.keys() & theirs.keys():
                found.setdefault(cell, []).append(ours[cell] - theirs[cell])
        return cls(times=len(rounds), differences=found)

    @property
    def total(self) -> Paired:
        """Every time counted."""
        every = [one for own in self.differences.values() for one in own]
        return Paired(states=len(every), won=every.count(1), lost=every.count(-1))

    @property
    def design_effect(self) -> float:
        """By how much the variance of the gain is larger than if a state's episodes were independent, at least 1.

        It is the number of times if a state's outcome is always the same, and where no difference can tell.
        """
        gain = self.total.gain
        alone = sum((one - gain) ** 2 for own in self.differences.values() for one in own)
        clustered = sum((sum(own) - len(own) * gain) ** 2 for own in self.differences.values())
        can_tell = alone and len(self.differences) > 1
        return min(max(1.0, clustered / alone), float(self.times)) if can_tell else float(self.times)

    @property
    def interval(self) -> tuple[float, float]:
        """As that of single pairs, of as many pairs as would be worth as much if they were independent (Rao and Scott,
        1992)."""
        total, effect = self.total, self.design_effect
        return _bonett_price(total.states / effect, total.won / effect, total.lost / effect)

    @property
    def p_value(self) -> float:
        """One-sided exact sign-flip test of "the policy is better": if the two are equally good, each state's sum has
        either sign with the same probability. For states that were played once this is the sign test of `Paired`."""
        import numpy as np

        sums = [sum(own) for own in self.differences.values()]
        sizes = [abs(one) for one in sums if one]
        chances = np.ones(1)  # of the sum of those that are positive, from 0 on
        for size in sizes:
            chances = np.convolve(chances, [0.5, *[0.0] * (size - 1), 0.5])
        return min(1.0, float(chances[sum(one for one in sums if one > 0) :].sum()))

    def to_json(self) -> dict[str, float | int]:
        """As of `Paired`: every time is counted, and interval and p are those of states."""
        low, high = self.interval
        return {**self.total.to_json(), "low": low, "high": high, "p_value": self.p_value}


def _bonett_price(states: float, won: float, lost: float) -> tuple[float, float]:
    from scipy.stats import norm

    states, won, lost = states + 2, won + 1, lost + 1
    gain = (won - lost) / states
    reach = float(norm.ppf((1 + CONFIDENCE) / 2)) * math.sqrt(((won + lost) / states - gain**2) / states)
    return max(-1.0, gain - reach), min(1.0, gain + reach)


def by_task(ours: Mapping[Cell, bool], theirs: Mapping[Cell, bool]) -> dict[str, Paired]:
    """The same task by task, of those that both played."""
    tasks = dict.fromkeys(task for task, state in ours if (task, state) in theirs)
    return {
        task: Paired.between(
            {cell: won for cell, won in ours.items() if cell[0] == task},
            {cell: won for cell, won in theirs.items() if cell[0] == task},
        )
        for task in tasks
    }
