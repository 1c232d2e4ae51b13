"""How the network of a policy is computed: as it is, compiled, or with less memory for activations, and for how many
decisions at once."""

from __future__ import annotations

import functools

import torch
from torch.utils.checkpoint import checkpoint

from nightshift.errors import ConfigError
from nightshift.policies.base import Policy


def prepare_network(policy: Policy, *, compiled: bool = False, recomputed: bool = False, sharded: bool = False) -> None:
    """Do not copy the policy after this: what is compiled belongs to this one.

    `compiled`: with torch.compile, at the first call; modules of one kind share what is compiled. Norms, rotations
    and activations become few kernels, and what is cheap is recomputed in the backward pass instead of kept.

    `recomputed`: memory for the activations of one block instead of all of them, for one more forward pass per update.

    `sharded`: FSDP will gather the weights of each block before its `forward`.
    """
    if compiled:
        # torch compiles nothing of a module whose forward is a checkpoint or is wrapped by FSDP: those stay outside.
        for module in policy.transformer_blocks if recomputed or sharded else policy.compiled_modules:
            module.forward = torch.compile(module.forward)
    if recomputed:
        for block in policy.transformer_blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def decisions_within(policy: Policy, tokens: int) -> int:
    """How many decisions a pass with this budget of tokens (machine.microbatch_tokens) has room for."""
    each = policy.tokens_per_decision
    if not each:
        raise ConfigError(
            f"machine.microbatch_tokens is {tokens}, and the policy family {policy.spec['family']} has no tokens",
            "set it to null and machine.microbatch_size to a number of decisions in params.yaml",
        )
    if tokens < each:
        raise ConfigError(
            f"machine.microbatch_tokens is {tokens}, and one decision of the policy has {each} tokens",
            f"raise it to {each} or more in params.yaml, or lower policy.max_tokens or the number of cameras",
        )
    return tokens // each


def require_blocks(policy: Policy, setting: str) -> None:
    if not policy.transformer_blocks:
        raise ConfigError(
            f"{setting} is on, and the policy family {policy.spec['family']} has no transformer blocks",
            "turn it off in params.yaml, or choose vla, flow, openvla-oft or pi0",
        )
