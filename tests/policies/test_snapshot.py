"""Weights travel between processes bit for bit, each in its own dtype."""

from __future__ import annotations

import pickle

import pytest
import torch

from nightshift.policies.gaussian_mlp import GaussianMlp
from nightshift.policies.snapshot import PolicySnapshot, restore, snapshot

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_every_dtype_arrives_as_it_was_sent(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    sent = (torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 3 - 1).to(dtype)
    made = PolicySnapshot.of({}, {"weight": sent}, version=2)
    arrived = pickle.loads(pickle.dumps(made)).tensors()["weight"]
    assert arrived.dtype == dtype
    assert torch.equal(arrived, sent)


def test_a_snapshot_keeps_its_weights_while_the_policy_learns() -> None:
    policy = GaussianMlp(inputs={"objects": 3}, hidden=[4], chunk=1, action_dim=7)
    taken, before = snapshot(policy), {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1)
    restored = restore(taken, CPU).state_dict()
    assert all(torch.equal(restored[name], tensor) for name, tensor in before.items())


def test_bf16_weights_reach_a_policy_of_another_precision_unrounded() -> None:
    policy = GaussianMlp(inputs={"objects": 3}, hidden=[4], chunk=1, action_dim=7).bfloat16()
    restored = restore(snapshot(policy), CPU).state_dict()
    assert all(torch.equal(restored[name], tensor.float()) for name, tensor in policy.state_dict().items())
