"""The learner of one process: alone, or as one rank of several (ranks.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from nightshift.algorithms.estimators import Groups
from nightshift.algorithms.on_policy import OnPolicyLearner
from nightshift.algorithms.sft import Demos
from nightshift.algorithms.strategy import SingleProcess, Strategy
from nightshift.learners.base import LearnerSpec, LearnerState
from nightshift.policies.blocks import compile_blocks, recompute_activations
from nightshift.policies.device import POLICY_SIZE, out_of_memory_advice
from nightshift.policies.snapshot import PolicySnapshot, restore

_CPU = torch.device("cpu")


class LocalLearner:
    """One learner in this process."""

    def __init__(self, spec: LearnerSpec) -> None:
        self._rank = Rank(spec, SingleProcess())
        self._start = spec.policy

    def update(self, parts: Sequence[Groups], progress: float) -> dict[str, float]:
        return self._rank.update(parts[0], progress)

    def policy(self) -> PolicySnapshot:
        return self._rank.policy()

    def state(self) -> LearnerState:
        return self._rank.state()

    def write_shards(self, folder: Path) -> Mapping[str, str]:
        return {}

    def restore(self, state: LearnerState) -> None:
        state.policy_weights(self._start)
        self._rank.restore(state)

    def close(self) -> None:
        """Nothing to close."""


class Rank:
    """A learner; `strategy` connects it to other ranks."""

    def __init__(self, spec: LearnerSpec, strategy: Strategy) -> None:
        torch.set_num_threads(1)  # one order of summation on every machine: the same weights everywhere
        torch.manual_seed(spec.seed)  # for the initial weights of a critic
        self._frozen = spec.policy.frozen
        self._strategy = strategy
        with out_of_memory_advice(POLICY_SIZE):
            self._learner = _make_learner(spec, strategy)

    def update(self, groups: Groups, progress: float) -> dict[str, float]:
        with out_of_memory_advice("machine.microbatch_size"):
            return self._learner.update(groups, progress)

    def policy(self) -> PolicySnapshot:
        """Of ranks that shard it all have to ask, and rank 0 gets the weights."""
        policy = self._learner.policy
        weights = self._strategy.trained_weights(policy)
        return PolicySnapshot.of(policy.spec, weights, self._learner.version, self._frozen)

    def state(self) -> LearnerState:
        tensors = {} if self._strategy.shards else self._learner.tensors()
        return LearnerState(tensors=tensors, counters=self._learner.counters)

    def write_shards(self, folder: Path) -> Mapping[str, str]:
        from nightshift.learners import shards  # torch's checkpoints take a second to import

        return shards.write(folder, self._learner.tensors(), self._strategy.rank)

    def restore(self, state: LearnerState) -> None:
        with out_of_memory_advice(POLICY_SIZE):
            tensors = state.read(self._strategy.allocate(self._learner.trained))
            self._learner.restore(tensors, state.counters)

    @property
    def microbatches(self) -> int:
        """Done so far."""
        return self._learner.microbatches


def _make_learner(spec: LearnerSpec, strategy: Strategy) -> OnPolicyLearner:
    # What is sharded is moved to the device part by part: it may not fit there as a whole.
    policy = restore(spec.policy, _CPU if strategy.shards else spec.device)
    if spec.gradient_checkpointing:
        recompute_activations(policy)
    if spec.compile:
        compile_blocks(policy)
    demos = None if spec.demos is None else Demos(policy, spec.demos.observe, spec.demos.actions, spec.demos.mask)
    return OnPolicyLearner(
        policy,
        spec.settings,
        torch.Generator().manual_seed(spec.seed),
        microbatch_size=spec.microbatch_size,
        demos=demos,
        strategy=strategy,
    )
