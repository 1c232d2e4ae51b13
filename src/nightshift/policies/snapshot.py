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
from nightshift.policies.base import Policy

_BITS = {torch.bfloat16: torch.int16}
"""Dtypes that numpy does not have, and those of the same size that their bits travel as."""


@dataclass(frozen=True, kw_only=True)
class PolicySnapshot:
    """The JSON that builds a policy, and its weights.

    Weights travel as numpy arrays, which Ray's object store shares between processes without a copy.
    """

    spec: Mapping[str, Any]
    weights: Mapping[str, NDArray[Any]]
    dtypes: Mapping[str, torch.dtype]
    """Of the weights whose arrays hold the bits of another dtype."""
    version: int = 0
    """Updates so far."""
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Unique per snapshot, so that a worker which holds this one already does not build it again."""

    @classmethod
    def of(cls, spec: Mapping[str, Any], tensors: Mapping[str, Tensor], version: int) -> PolicySnapshot:
        """With copies of `tensors`."""
        return cls(
            spec=spec,
            weights={name: _to_array(tensor) for name, tensor in tensors.items()},
            dtypes={name: tensor.dtype for name, tensor in tensors.items() if tensor.dtype in _BITS},
            version=version,
        )

    def tensors(self) -> dict[str, Tensor]:
        """Copies of the weights: arrays from Ray's object store are read-only."""
        found = {name: torch.tensor(values) for name, values in self.weights.items()}
        return {name: t.view(self.dtypes[name]) if name in self.dtypes else t for name, t in found.items()}


def restore(snapshot: PolicySnapshot, device: torch.device) -> Policy:
    return policies.build(snapshot.spec, snapshot.tensors()).to(device)


def snapshot(policy: Policy, version: int = 0) -> PolicySnapshot:
    return PolicySnapshot.of(policy.spec, policy.state_dict(), version)


def _to_array(tensor: Tensor) -> NDArray[Any]:
    copied = tensor.detach().clone().cpu().contiguous()
    array: NDArray[Any] = copied.view(_BITS.get(copied.dtype, copied.dtype)).numpy()
    return array
