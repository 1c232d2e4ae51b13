"""Greedy episodes on the validation states: how good the policy is that would be handed on now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nightshift.algorithms.selection import Outcomes, Validation, best_trained, select
from nightshift.envs.splits import TrainingStates
from nightshift.errors import RolloutError
from nightshift.policies.snapshot import PolicySnapshot
from nightshift.rollouts.base import Pool
from nightshift.types import RolloutRequest, Trajectory

_BEST = "best."
"""Prefix of the tensors of the best trained policy in a checkpoint."""


@dataclass(frozen=True)
class Judge:
    """Says whether an episode succeeded."""

    request: Callable[[RolloutRequest], RolloutRequest]
    """Adds what it has to see."""
    is_success: Callable[[Trajectory], bool]


BY_SIMULATOR = Judge(request=lambda request: request, is_success=lambda episode: episode.success)


class Validator:
    def __init__(self, pool: Pool, states: Mapping[str, TrainingStates], judge: Judge = BY_SIMULATOR) -> None:
        """`states` by task."""
        self._pool = pool
        self._judge = judge
        self._requests = [
            judge.request(
                RolloutRequest(task=task, split="validation", init_state=state, controller="greedy", seed=state)
            )
            for task, split in states.items()
            for state in split.validation
        ]

    def play(self, policy: PolicySnapshot) -> Outcomes:
        """One episode from every validation state; those that the simulator failed in are left out."""
        played = [episode for _, (episode,) in self._pool.run(self._requests, policy)]
        outcomes = {
            (one.request.task, one.request.init_state): self._judge.is_success(one) for one in played if one.valid
        }
        if not outcomes:
            raise RolloutError("the simulator failed in every validation episode", "run again: it resumes")
        return outcomes


class Selection:
    """The validations of a training run, and the best of the policies that were trained."""

    def __init__(self, validator: Validator, start: PolicySnapshot) -> None:
        """`start`: the policy that training starts from."""
        self._validator = validator
        self._start = start
        self.best = start
        """Of the policies that were trained and validated; the start until there is one."""
        self.validations: list[Validation] = []

    def validate(self, policy: PolicySnapshot, iteration: int) -> Validation:
        """Play the greedy policy on the validation states, and keep it if it is the best trained one so far."""
        found = Validation(iteration=iteration, outcomes=self._validator.play(policy))
        self.validations.append(found)
        if best_trained(self.validations) is found:
            self.best = policy
        return found

    def kept(self, level: float) -> Validation:
        """That of the policy to hand on: of `best`, or of the start, whose iteration is 0."""
        return select(self.validations, level)

    def to_json(self, level: float) -> dict[str, Any]:
        """For figures and reports."""
        validations = [
            {"iteration": v.iteration, "successes": v.successes, "episodes": len(v.outcomes)} for v in self.validations
        ]
        return {"validation": validations, "kept": self.kept(level).iteration}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint, together with `state`; none while the best is the start, which a resumed run has anyway."""
        if self.best is self._start:
            return {}
        return {f"{_BEST}{name}": tensor for name, tensor in self.best.tensors().items()}

    @property
    def state(self) -> dict[str, Any]:
        return {"best": self.best.version, "validations": [one.to_json() for one in self.validations]}

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Continue with what `tensors` and `state` were; other tensors of the checkpoint are left alone."""
        weights = {name.removeprefix(_BEST): tensor for name, tensor in tensors.items() if name.startswith(_BEST)}
        start = self._start
        self.best = PolicySnapshot.of(start.spec, weights, state["best"], start.frozen) if weights else start
        self.validations = [Validation.from_json(content) for content in state["validations"]]


def without_best(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint that are not those of a `Selection`."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(_BEST)}
