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
        from scipy.stats import norm

        states = self.states + 2
        won, lost = (self.won + 1) / states, (self.lost + 1) / states
        reach = norm.ppf((1 + CONFIDENCE) / 2) * math.sqrt((won + lost - (won - lost) ** 2) / states)
        return max(-1.0, won - lost - float(reach)), min(1.0, won - lost + float(reach))

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
