"""Greedy episodes on the validation states: how good the policy is that would be handed on now."""

from __future__ import annotations

from collections.abc import Mapping

from nightshift.algorithms.selection import Outcomes
from nightshift.envs.splits import TrainingStates
from nightshift.errors import RolloutError
from nightshift.policies.snapshot import PolicySnapshot
from nightshift.rollouts.base import Pool
from nightshift.types import RolloutRequest


class Validator:
    def __init__(self, pool: Pool, states: Mapping[str, TrainingStates]) -> None:
        """`states` by task."""
        self._pool = pool
        self._requests = [
            RolloutRequest(task=task, split="validation", init_state=state, controller="greedy", seed=state)
            for task, split in states.items()
            for state in split.validation
        ]

    def play(self, policy: PolicySnapshot) -> Outcomes:
        """One episode from every validation state; those that the simulator failed in are left out."""
        played = [episode for _, (episode,) in self._pool.run(self._requests, policy)]
        outcomes = {(one.request.task, one.request.init_state): one.success for one in played if one.valid}
        if not outcomes:
            raise RolloutError("the simulator failed in every validation episode", "run again: it resumes")
        return outcomes
