"""What a learner is built from, what it can do and what a checkpoint holds of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from nightshift.algorithms import strategy
from nightshift.algorithms.strategy import Allocate, Strategy, Trained, allocate_whole
from nightshift.errors import DataError
from nightshift.policies.base import Policy
from nightshift.policies.snapshot import PolicySnapshot

Work_contra = TypeVar("Work_contra", contravariant=True)
"""What one rank is given for one update: a part of the episodes, or a number of gradient steps."""


class Learner(Protocol[Work_contra]):
    """An algorithm's update, with the networks and optimizers that it changes."""

    @property
    def policy(self) -> Policy: ...

    @property
    def trained(self) -> Trained: ...

    @property
    def version(self) -> int:
        """Updates of the policy so far."""
        ...

    @property
    def microbatches(self) -> int:
        """So far: rises during an update, so another thread can see that it is alive."""
        ...

    def update(self, work: Work_contra, /) -> dict[str, float]:
        """The metrics, which are the same on all ranks."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must hold; `counters` are the rest."""
        ...

    @property
    def counters(self) -> dict[str, float]:
        """`version` is one of them."""
        ...

    def restore(self, tensors: Mapping[str, Tensor], counters: Mapping[str, float]) -> None: ...


class Algorithm(Protocol[Work_contra]):
    """Settings and data of a learner (algorithms.py); sent to every rank."""

    def learner(
        self, policy: Policy, *, seed: int, microbatch_size: int, strategy: Strategy
    ) -> Learner[Work_contra]: ...


@dataclass(frozen=True, kw_only=True)
class LearnerSpec(Generic[Work_contra]):
    """What every rank is built from."""

    policy: PolicySnapshot
    algorithm: Algorithm[Work_contra]
    seed: int
    microbatch_size: int
    microbatch_tokens: int | None = None
    """Decides in the place of microbatch_size where it is given."""
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
    """`Learner.counters`."""
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
        """Updates of the policy so far."""
        return int(self.counters["version"])


class Learners(Protocol[Work_contra]):
    """One learner, or several ranks that behave as one."""

    def update(self, parts: Sequence[Work_contra]) -> dict[str, float]:
        """One update from one part of the work per rank; the metrics."""
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
