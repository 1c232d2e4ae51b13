"""The reference policy of the KL penalty: the policy as it was when training began."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from nightshift.policies.base import Inputs, Policy


class Reference:
    """Keeps a copy of the weights that training changes, and shares the others with the policy. With adapters it is the
    base model and the adapter of the start, not a second model."""

    def __init__(self, policy: Policy) -> None:
        """`policy` is about to be trained."""
        self._log_prob = _LogProb(policy)
        trained = {name: p for name, p in self._log_prob.named_parameters() if p.requires_grad}
        self._start = {name: parameter.detach().clone() for name, parameter in trained.items()}

    @torch.no_grad()
    def log_prob(self, inputs: Inputs, actions: Tensor, temperature: float) -> Tensor:
        """As of `Policy`."""
        found: Tensor = functional_call(self._log_prob, self._start, (inputs, actions, temperature))
        return found


class _LogProb(nn.Module):
    """A policy whose `forward` is `log_prob`: weights can be exchanged for a call of `forward` alone."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, inputs: Inputs, actions: Tensor, temperature: float) -> Tensor:
        return self.policy.log_prob(inputs, actions, temperature)
