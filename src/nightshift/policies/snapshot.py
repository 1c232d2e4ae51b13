"""Policies as they are sent between processes."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nightshift import policies
from nightshift.policies.base import Policy


@dataclass(frozen=True, kw_only=True)
class PolicySnapshot:
    """The JSON that builds a policy, and its weights."""

    spec: Mapping[str, Any]
    weights: Mapping[str, NDArray[np.float32]]
    version: int = 0
    """Updates so far."""
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Unique per snapshot, so that a worker which holds this one already does not build it again."""


def restore(snapshot: PolicySnapshot) -> Policy:
    policy = policies.build(snapshot.spec)
    # Arrays from Ray's object store are read-only, so torch gets copies.
    policy.load_state_dict({name: torch.tensor(values) for name, values in snapshot.weights.items()})
    return policy


def snapshot(policy: Policy, version: int = 0) -> PolicySnapshot:
    weights = {name: tensor.detach().numpy().copy() for name, tensor in policy.state_dict().items()}
    return PolicySnapshot(spec=policy.spec, weights=weights, version=version)
