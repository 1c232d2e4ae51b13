"""What RLPD learns from: transitions from decision to decision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nightshift.policies.base import Inputs


@dataclass(frozen=True)
class Transitions:
    """N transitions. C actions per decision, A dimensions."""

    inputs: Inputs  # each [N, …] what the policy sees when it decides
    actions: Tensor  # [N, C, A] as they were executed
    rewards: Tensor  # [N] discounted sum over the control steps that the transition spans
    discounts: Tensor  # [N] of the value of what follows: zero after termination, and only there
    next_inputs: Inputs  # each [N, …] what the policy sees when it decides again
    bc_actions: Tensor  # [N, C, A] what cloning imitates: actions as they were chosen
    bc_mask: Tensor  # [N, C] true for the actions of demos, and of interventions that are cloned
    bc_filter: Tensor  # [N, C] true for those of them that are cloned only where the critics prefer them

    def __len__(self) -> int:
        return len(self.rewards)

    def slices(self, size: int) -> list[Transitions]:
        """Consecutive parts of `size` transitions."""
        return [self._part(slice(start, start + size)) for start in range(0, len(self), size)]

    def to(self, device: torch.device) -> Transitions:
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def _part(self, rows: slice) -> Transitions:
        return self._map(lambda tensor: tensor[rows])

    def _map(self, change: Callable[[Tensor], Tensor]) -> Transitions:
        return Transitions(
            inputs={name: change(tensor) for name, tensor in self.inputs.items()},
            actions=change(self.actions),
            rewards=change(self.rewards),
            discounts=change(self.discounts),
            next_inputs={name: change(tensor) for name, tensor in self.next_inputs.items()},
            bc_actions=change(self.bc_actions),
            bc_mask=change(self.bc_mask),
            bc_filter=change(self.bc_filter),
        )


def from_replay(batch: Mapping[str, Any]) -> Transitions:
    """A batch of `data.replay` whose observations are a policy's inputs and whose actions are chunks.

    Its `mask` is zero after termination, and only there. A transition that was stored with its return over several
    steps has their discount among its `forward_inputs`; otherwise the buffer has summed up the steps and knows it.
    """
    return Transitions(
        inputs=_tensors(batch["curr_obs"]),
        actions=torch.from_numpy(batch["actions"]),
        rewards=torch.from_numpy(batch["rewards"]),
        discounts=torch.from_numpy(batch["forward_inputs"].get("discounts", batch["discounts"]) * batch["mask"]),
        next_inputs=_tensors(batch["next_obs"]),
        bc_actions=torch.from_numpy(batch["forward_inputs"]["bc_actions"]),
        bc_mask=torch.from_numpy(batch["forward_inputs"]["bc_mask"]),
        bc_filter=torch.from_numpy(batch["forward_inputs"]["bc_filter"]),
    )


def _tensors(columns: Mapping[str, NDArray[np.generic]]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(column) for name, column in columns.items()}
