"""What a learner is built from, what it can do and what a checkpoint holds of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nightshift import config
from nightshift.algorithms.estimators import Groups
from nightshift.data.dataset_store import CloningSteps
from nightshift.policies.snapshot import PolicySnapshot


@dataclass(frozen=True, kw_only=True)
class LearnerSpec:
    """What every rank is built from."""

    policy: PolicySnapshot
    settings: config.Rloo
    seed: int
    demos: CloningSteps | None
    """For the behaviour-cloning loss."""
    microbatch_size: int
    gradient_checkpointing: bool
    compile: bool
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class LearnerState:
    """What a checkpoint holds of a learner."""

    tensors: Mapping[str, Tensor]
    """Weights, optimizer moments and the random generator."""
    counters: Mapping[str, float]
    """`OnPolicyLearner.counters`."""

    @property
    def version(self) -> int:
        """Updates so far."""
        return int(self.counters["version"])


class Learners(Protocol):
    """One learner, or several ranks that behave as one."""

    def update(self, parts: Sequence[Groups], progress: float) -> dict[str, float]:
        """One update from one part of the groups per rank; the metrics."""
        ...

    def policy(self) -> PolicySnapshot: ...

    def state(self) -> LearnerState: ...

    def restore(self, state: LearnerState) -> None: ...

    def close(self) -> None: ...
