"""Which policy of a training run is handed on: the best by greedy success on validation states.

Sampled success rises while a policy trains; greedy success may fall meanwhile. Both are measured, and the greedy one
decides. Policies are compared on the same init states, so a paired test applies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nightshift.statistics.paired import Cell, Paired

Outcomes = Mapping[Cell, bool]
"""Success by (task, init state), of the episodes that were valid."""


@dataclass(frozen=True, kw_only=True)
class Validation:
    """How the policy after `iteration` updates did on the validation states."""

    iteration: int
    outcomes: Outcomes

    @property
    def successes(self) -> int:
        return sum(self.outcomes.values())

    @property
    def success_rate(self) -> float:
        return self.successes / max(len(self.outcomes), 1)

    def to_json(self) -> dict[str, Any]:
        episodes = [[task, state, success] for (task, state), success in sorted(self.outcomes.items())]
        return {"iteration": self.iteration, "episodes": episodes}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Validation:
        outcomes = {(task, state): success for task, state, success in content["episodes"]}
        return cls(iteration=content["iteration"], outcomes=outcomes)


def best_trained(validations: Sequence[Validation]) -> Validation | None:
    """The one that solves most states after the first validation, which is of the policy that training started from. Of
    equals the latest: it has learned from more episodes.

    Each is compared with the best before it, on the states that were valid for both: a later validation, of which some
    episodes are invalid, changes no earlier choice, whose weights alone are kept.
    """
    best: Validation | None = None
    for each in validations[1:]:
        if best is None or Paired.between(each.outcomes, best.outcomes).gain >= 0:
            best = each
    return best


def select(validations: Sequence[Validation], level: float) -> Validation:
    """The policy to hand on: the best trained one if the sign test finds it better than the start at `level`.

    The maximum of several noisy rates is too high by chance, so a plain maximum would often replace a good start by a
    policy that is no better. The start is therefore given up only for a difference that chance hardly explains.
    """
    start, best = validations[0], best_trained(validations)
    if best is not None and Paired.between(best.outcomes, start.outcomes).p_value <= level:
        return best
    return start
