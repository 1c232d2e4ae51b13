"""Small learners of RLPD, and transitions for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import yaml

from nightshift import config
from nightshift.algorithms.rlpd.transitions import Transitions
from nightshift.policies.heads import HeadPolicy
from tests.conftest import REPOSITORY
from tests.policies import examples

ROWS = 6
SECTION: dict[str, Any] = yaml.safe_load((REPOSITORY / "params.yaml").read_text())["rlpd"]
SMALL: dict[str, Any] = {
    "batch_size": ROWS,
    "discount": 0.9,
    "critics": {"num_qs": 4, "num_min_qs": 2, "hidden": [8, 8], "learning_rate": 1e-2, "tau": 0.1},
    "actor": {"start": "scratch", "learning_rate": 1e-2, "bc_weight": 0.0, "bc_steps": 0, "ema_decay": 0.9},
    "entropy": {"initial_temperature": 0.5, "learning_rate": 1e-2, "target": -0.5, "backup": True},
}


def settings(**changes: Any) -> config.Rlpd:
    return config.Rlpd.model_validate(config.merged(config.merged(SECTION, SMALL), changes))


def state_policy() -> HeadPolicy:
    return examples.make("gaussian_mlp tanh_gaussian")


def seeing_policy() -> HeadPolicy:
    return examples.make("cnn tanh_gaussian")


def transitions(policy: HeadPolicy, rows: int = ROWS, seed: int = 0) -> Transitions:
    """Some end in termination, one in truncation; the first half are demos."""
    generator = torch.Generator().manual_seed(seed)
    chunk = (rows, policy.chunk, policy.action_dim)
    alive = torch.ones(rows)
    alive[::3] = 0
    demo = torch.arange(rows) < rows // 2
    return Transitions(
        inputs=policy.inputs(examples.observe(rows, seed)),
        actions=2 * torch.rand(chunk, generator=generator) - 1,
        rewards=torch.rand(rows, generator=generator),
        discounts=0.9 * alive,
        next_inputs=policy.inputs(examples.observe(rows, seed + 1000)),
        bc_actions=2 * torch.rand(chunk, generator=generator) - 1,
        bc_mask=demo[:, None].expand(rows, policy.chunk),
        bc_filter=torch.zeros(rows, policy.chunk, dtype=torch.bool),
    )


def concatenated(parts: Sequence[Transitions]) -> Transitions:
    """The slices of one update."""
    first = parts[0]
    return Transitions(
        inputs={name: torch.cat([part.inputs[name] for part in parts]) for name in first.inputs},
        actions=torch.cat([part.actions for part in parts]),
        rewards=torch.cat([part.rewards for part in parts]),
        discounts=torch.cat([part.discounts for part in parts]),
        next_inputs={name: torch.cat([part.next_inputs[name] for part in parts]) for name in first.next_inputs},
        bc_actions=torch.cat([part.bc_actions for part in parts]),
        bc_mask=torch.cat([part.bc_mask for part in parts]),
        bc_filter=torch.cat([part.bc_filter for part in parts]),
    )
