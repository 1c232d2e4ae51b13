"""The learner of one process: alone, or as one rank of several (ranks.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nightshift.algorithms.estimators import Groups
from nightshift.algorithms.on_policy import OnPolicyLearner
from nightshift.algorithms.sft import Demos
from nightshift.algorithms.strategy import Strategy
from nightshift.learners.base import LearnerSpec, LearnerState
from nightshift.policies.blocks import compile_blocks, recompute_activations
from nightshift.policies.device import POLICY_SIZE, out_of_memory_advice
from nightshift.policies.snapshot import PolicySnapshot, restore, snapshot


class LocalLearner:
    """One learner in this process."""

    def __init__(self, spec: LearnerSpec) -> None:
        self._rank = Rank(spec)

    def update(self, parts: Sequence[Groups], progress: float) -> dict[str, float]:
        return self._rank.update(parts[0], progress)

    def policy(self) -> PolicySnapshot:
        return self._rank.policy()

    def state(self) -> LearnerState:
        return self._rank.state()

    def restore(self, state: LearnerState) -> None:
        self._rank.restore(state)

    def close(self) -> None:
        """Nothing to close."""


class Rank:
    """A learner; `strategy` connects it to other ranks."""

    def __init__(self, spec: LearnerSpec, strategy: Strategy | None = None) -> None:
        torch.set_num_threads(1)  # one order of summation on every machine: the same weights everywhere
        torch.manual_seed(spec.seed)  # for the initial weights of a critic
        with out_of_memory_advice(POLICY_SIZE):
            policy = restore(spec.policy, spec.device)
        if spec.gradient_checkpointing:
            recompute_activations(policy)
        if spec.compile:
            compile_blocks(policy)
        self._frozen = spec.policy.frozen
        demos = None if spec.demos is None else Demos(policy, spec.demos.observe, spec.demos.actions, spec.demos.mask)
        self._learner = OnPolicyLearner(
            policy,
            spec.settings,
            torch.Generator().manual_seed(spec.seed),
            microbatch_size=spec.microbatch_size,
            demos=demos,
            strategy=strategy,
        )

    def update(self, groups: Groups, progress: float) -> dict[str, float]:
        with out_of_memory_advice("machine.microbatch_size"):
            return self._learner.update(groups, progress)

    def policy(self) -> PolicySnapshot:
        return snapshot(self._learner.policy, self._learner.version, self._frozen)

    def state(self) -> LearnerState:
        return LearnerState(tensors=self._learner.tensors(), counters=self._learner.counters)

    def restore(self, state: LearnerState) -> None:
        with out_of_memory_advice(POLICY_SIZE):
            self._learner.restore(state.tensors, state.counters)

    @property
    def microbatches(self) -> int:
        """Done so far."""
        return self._learner.microbatches
