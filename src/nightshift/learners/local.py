"""The learner of one process: alone, or as one rank of several (ranks.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Generic

import torch

from nightshift.algorithms.strategy import SingleProcess, Strategy
from nightshift.learners.base import Learner, LearnerSpec, LearnerState, Work_contra
from nightshift.policies.blocks import decisions_within, prepare_network
from nightshift.policies.device import POLICY_SIZE, out_of_memory_advice
from nightshift.policies.snapshot import PolicySnapshot, restore

_CPU = torch.device("cpu")


class LocalLearner(Generic[Work_contra]):
    """One learner in this process."""

    def __init__(self, spec: LearnerSpec[Work_contra]) -> None:
        self._rank = Rank(spec, SingleProcess())
        self._start = spec.policy

    def update(self, parts: Sequence[Work_contra]) -> dict[str, float]:
        (work,) = parts
        return self._rank.update(work)

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


class Rank(Generic[Work_contra]):
    """A learner; `strategy` connects it to other ranks."""

    def __init__(self, spec: LearnerSpec[Work_contra], strategy: Strategy) -> None:
        torch.set_num_threads(1)  # one order of summation on every machine: the same weights everywhere
        torch.manual_seed(spec.seed)  # for the initial weights of a critic
        self._frozen = spec.policy.frozen
        self._strategy = strategy
        self._size_setting = f"machine.microbatch_{'size' if spec.microbatch_tokens is None else 'tokens'}"
        with out_of_memory_advice(POLICY_SIZE):
            self._learner = _make_learner(spec, strategy)

    def update(self, work: Work_contra) -> dict[str, float]:
        with out_of_memory_advice(self._size_setting):
            return self._learner.update(work)

    def policy(self) -> PolicySnapshot:
        """With a sharded policy all ranks have to call this, and rank 0 alone gets the weights."""
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
    def version(self) -> int:
        """Updates of the policy so far."""
        return self._learner.version

    @property
    def microbatches(self) -> int:
        """Done so far."""
        return self._learner.microbatches


def _make_learner(spec: LearnerSpec[Work_contra], strategy: Strategy) -> Learner[Work_contra]:
    # What is sharded is moved to the device part by part: it may not fit there as a whole.
    policy = restore(spec.policy, _CPU if strategy.shards else spec.device)
    prepare_network(policy, compiled=spec.compile, recomputed=spec.gradient_checkpointing, sharded=strategy.shards)
    tokens = spec.microbatch_tokens
    microbatch_size = spec.microbatch_size if tokens is None else decisions_within(policy, tokens)
    return spec.algorithm.learner(policy, seed=spec.seed, microbatch_size=microbatch_size, strategy=strategy)
