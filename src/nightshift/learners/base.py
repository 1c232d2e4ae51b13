"""What a learner is built from, what it can do and what a checkpoint holds of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from nightshift import config
from nightshift.algorithms import strategy
from nightshift.algorithms.estimators import Groups
from nightshift.algorithms.strategy import Allocate, allocate_whole
from nightshift.data.dataset_store import CloningSteps
from nightshift.errors import DataError
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
    strategy: Literal["data_parallel", "fsdp"]
    """What several ranks hold of the policy."""
    cpu_offload: bool
    """With fsdp: a rank's part is on the CPU between two passes."""


@dataclass(frozen=True, kw_only=True)
class LearnerState:
    """What a checkpoint holds of a learner."""

    tensors: Mapping[str, Tensor]
    """Weights, optimizer moments and the random generator."""
    counters: Mapping[str, float]
    """`OnPolicyLearner.counters`."""
    shards: Path | None = None
    """A folder that holds the tensors instead, as sharded ranks wrote it."""

    def read(self, allocate: Allocate = allocate_whole, prefix: str = "") -> Mapping[str, Tensor]:
        """The tensors; of a folder, those whose names begin with `prefix`, into what `allocate` makes."""
        if self.shards is None:
            return self.tensors
        from nightshift.learners import shards  # torch's checkpoints take a second to import

        return shards.read(self.shards, allocate, prefix)

    def policy_weights(self, start: PolicySnapshot) -> dict[str, Tensor]:
        """The whole weights of the policy that began as `start`; DataError if they are of another network."""
        weights = strategy.weights(self.read(prefix="policy.weights."), "policy")
        _require_same_network(weights, start)
        return weights

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

    def state(self) -> LearnerState:
        """For a checkpoint; without the tensors where `write_shards` writes them."""
        ...

    def write_shards(self, folder: Path) -> Mapping[str, str]:
        """Every sharded rank writes its part of the tensors; the sha256 sums of the files, none without sharding."""
        ...

    def restore(self, state: LearnerState) -> None: ...

    def close(self) -> None: ...


def _require_same_network(weights: Mapping[str, Tensor], policy: PolicySnapshot) -> None:
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    expected = {name: tuple(array.shape) for name, array in policy.weights.items()}
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise DataError(
                f"the checkpoint is of another policy: {name} is {_shape(found.get(name))} there and "
                f"{_shape(expected.get(name))} here",
                "remove this stage's folder in .state and run again: training starts from the beginning",
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"{list(shape)}"
