"""Gradient checkpointing: activations of transformer blocks are computed again in the backward pass."""

from __future__ import annotations

import functools

from torch.utils.checkpoint import checkpoint

from nightshift.errors import ConfigError
from nightshift.policies.base import Policy


def recompute_activations(policy: Policy) -> None:
    """Memory for the activations of one block instead of all of them, for one more forward pass per update."""
    for block in policy.transformer_blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def require_blocks(policy: Policy) -> None:
    if not policy.transformer_blocks:
        raise ConfigError(
            f"machine.gradient_checkpointing is on, and the policy family {policy.spec['family']} has no transformer "
            "blocks",
            "turn it off in params.yaml, or choose vla, flow, openvla-oft or pi0",
        )
