"""Trained weights are float32: a bfloat16 has 8 bits, and most steps of an optimizer are smaller than its last one."""

from __future__ import annotations

import torch

from nightshift.errors import ConfigError
from nightshift.policies.base import Policy


def require_float32_where_trained(policy: Policy) -> None:
    """ConfigError if the optimizer would change weights of another dtype. Frozen ones may have any."""
    trained = [(name, p.dtype) for name, p in policy.named_parameters() if p.requires_grad]
    narrow = [(name, dtype) for name, dtype in trained if dtype != torch.float32]
    if narrow:
        name, dtype = narrow[0]
        raise ConfigError(
            f"{len(narrow)} of {len(trained)} trained tensors of the policy are no float32, e.g. {name} is "
            f"{str(dtype).removeprefix('torch.')}: most steps of the optimizer would be rounded away",
            "set policy.dtype: float32 in params.yaml (a GPU computes in bfloat16 all the same), or policy.lora, whose "
            "adapters are float32 beside a bfloat16 base",
        )
