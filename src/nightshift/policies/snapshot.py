"""Policies as they are sent between processes."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from nightshift import policies
from nightshift.policies.arrays import to_array, to_tensor
from nightshift.policies.base import Policy
from nightshift.policies.blocks import prepare_network


def _new_token() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True, kw_only=True)
class WeightArrays:
    """Weights as numpy arrays, which Ray's object store shares between processes without a copy."""

    weights: Mapping[str, NDArray[Any]]
    token: str = field(default_factory=_new_token)
    """Unique, so that a process which holds these already does not take them again."""

    @classmethod
    def copy_of(cls, tensors: Mapping[str, Tensor]) -> WeightArrays:
        return cls(weights={name: to_array(tensor.detach().clone()) for name, tensor in tensors.items()})

    def tensors(self) -> dict[str, Tensor]:
        """Copies: arrays from Ray's object store are read-only."""
        return {name: to_tensor(values.copy()) for name, values in self.weights.items()}


@dataclass(frozen=True, kw_only=True)
class PolicySnapshot(WeightArrays):
    """The JSON that builds a policy, and its weights."""

    spec: Mapping[str, Any]
    frozen: WeightArrays | None = None
    """Weights that no training changes: every version of a policy shares them, and each process takes them once."""
    version: int = 0
    """Updates so far."""

    @classmethod
    def of(
        cls,
        spec: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        version: int,
        frozen: WeightArrays | None = None,
    ) -> PolicySnapshot:
        """With copies of `tensors`, the weights that training changes."""
        return cls(spec=spec, weights=WeightArrays.copy_of(tensors).weights, frozen=frozen, version=version)


def snapshot(policy: Policy, version: int = 0, frozen: WeightArrays | None = None) -> PolicySnapshot:
    """`frozen`: those of another version of this policy, where there is one."""
    weights, untrained = policy.state_dict(), policy.frozen
    if frozen is None and untrained:
        frozen = WeightArrays.copy_of({name: weights[name] for name in untrained})
    trained = {name: tensor for name, tensor in weights.items() if name not in untrained}
    return PolicySnapshot.of(policy.spec, trained, version, frozen)


def restore(snapshot: PolicySnapshot, device: torch.device) -> Policy:
    frozen = {} if snapshot.frozen is None else snapshot.frozen.tensors()
    return policies.build(snapshot.spec, {**frozen, **snapshot.tensors()}).to(device)


class PolicySlot:
    """Holds one policy at a time. Of another version of the same policy, only what training changed is loaded."""

    def __init__(self, device: torch.device, *, compile: bool = False) -> None:
        self._device = device
        self._compile = compile
        self._policy: Policy | None = None
        self._frozen = ""
        """The token of its frozen weights; empty where it has none."""

    def load(self, snapshot: PolicySnapshot) -> Policy:
        frozen = snapshot.frozen.token if snapshot.frozen else ""
        if self._policy is not None and frozen and frozen == self._frozen:
            found = self._policy.load_state_dict(snapshot.tensors(), strict=False)
            assert set(found.missing_keys) <= self._policy.frozen and not found.unexpected_keys, found
            return self._policy
        self._policy = None  # its memory is needed
        self._policy, self._frozen = restore(snapshot, self._device), frozen
        prepare_network(self._policy, compiled=self._compile)
        return self._policy
