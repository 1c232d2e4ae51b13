"""The reference policy of the KL penalty: the policy as it was when training began."""

from __future__ import annotations

import torch
from torch import Tensor

from nightshift.algorithms.strategy import Strategy
from nightshift.policies.base import Inputs, Policy


class Reference:
    """Keeps a copy of the weights that training changes, and shares the others with the policy. With adapters it is the
    base model and the adapter of the start, not a second model."""

    def __init__(self, policy: Policy, strategy: Strategy) -> None:
        """`policy` is about to be trained."""
        self._policy = policy
        self._strategy = strategy
        self._trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        self._start = [parameter.detach().clone() for parameter in self._trained]

    @torch.no_grad()
    def log_prob(self, inputs: Inputs, actions: Tensor, temperature: float) -> Tensor:
        """As of `Policy`. The policy holds the weights of the start meanwhile, so no pass of its own may be between
        forward and backward."""
        now = [parameter.detach().clone() for parameter in self._trained]
        self._strategy.write(self._trained, self._start)
        try:
            return self._policy.log_prob(inputs, actions, temperature)
        finally:
            self._strategy.write(self._trained, now)
