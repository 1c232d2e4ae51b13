"""The head whose actions are a Gaussian through tanh."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from nightshift.policies.heads import CLONE_LOG_STD, TanhGaussianHead
from tests.policies.examples import generators

ROWS, CHUNK, DIMS = 4, 2, 3
SHAPE = (ROWS, CHUNK, DIMS)


@pytest.fixture
def head() -> TanhGaussianHead:
    head = TanhGaussianHead(DIMS)
    head.normalise_by({"std": [0.2, 0.5, 0.0]})
    return head


@pytest.fixture
def outputs() -> Tensor:
    return 0.5 * torch.randn(*SHAPE, 2, generator=torch.Generator().manual_seed(0))


def distribution(outputs: Tensor, temperature: float) -> TransformedDistribution:
    normal = Normal(outputs[..., 0], temperature * outputs[..., 1].exp())
    return TransformedDistribution(normal, [TanhTransform()])


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_log_probs_are_those_of_a_normal_transformed_by_tanh(
    head: TanhGaussianHead, outputs: Tensor, temperature: float
) -> None:
    actions = torch.linspace(-0.99, 0.99, ROWS * CHUNK * DIMS).reshape(SHAPE)
    expected = distribution(outputs, temperature).log_prob(actions)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(head.log_prob(outputs, actions, temperature), expected, rtol=1e-4, atol=1e-4)


def test_a_reparameterised_sample_has_the_log_prob_of_its_action_and_a_gradient(
    head: TanhGaussianHead, outputs: Tensor
) -> None:
    outputs.requires_grad_()
    noise = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    actions, log_probs = head.rsample(outputs, noise)
    torch.testing.assert_close(log_probs, head.log_prob(outputs, actions, 1.0), rtol=1e-3, atol=1e-3)
    expected = (outputs[..., 0] + outputs[..., 1].exp() * noise).tanh()
    torch.testing.assert_close(actions, expected)
    (gradient,) = torch.autograd.grad(actions.sum(), outputs)
    assert gradient.all()


def test_actions_of_demos_at_the_very_end_of_the_range_have_finite_log_probs(
    head: TanhGaussianHead, outputs: Tensor
) -> None:
    ends = torch.ones(SHAPE)
    assert head.log_prob(outputs, ends, 1.0).isfinite().all()
    assert head.log_prob(outputs, -ends, 1.0).isfinite().all()


def test_far_out_samples_have_finite_log_probs_and_gradients(head: TanhGaussianHead) -> None:
    outputs = torch.tensor([60.0, 1.0]).expand(*SHAPE, 2).clone().requires_grad_()
    actions, log_probs = head.rsample(outputs, torch.zeros(SHAPE))
    assert (actions == 1).all()
    assert log_probs.isfinite().all()
    assert torch.autograd.grad(log_probs.sum(), outputs)[0].isfinite().all()


def test_samples_approach_the_greedy_action_as_the_temperature_falls(head: TanhGaussianHead, outputs: Tensor) -> None:
    cold, _ = head.sample(outputs, generators(ROWS), 1e-6)
    torch.testing.assert_close(cold, head.greedy(outputs))


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_entropy_is_the_mean_of_the_negative_log_prob(
    head: TanhGaussianHead, outputs: Tensor, temperature: float
) -> None:
    many = outputs[:1, :1].expand(20000, 1, DIMS, 2)
    _, log_probs = head.sample(many, generators(20000), temperature)
    torch.testing.assert_close(head.entropy(outputs, temperature)[0, 0], -log_probs.mean((0, 1)), rtol=0, atol=0.05)


def test_cloning_is_the_squared_error_in_stds_of_the_demos_and_ties_the_std_to_a_constant(
    head: TanhGaussianHead,
) -> None:
    outputs = torch.zeros(1, 1, DIMS, 2)
    outputs[..., 1] = CLONE_LOG_STD
    mask = torch.ones(1, 1, dtype=torch.bool)
    actions = torch.tensor([0.2, 0.0, 0.03]).reshape(1, 1, DIMS)
    assert head.bc_loss(outputs, actions, mask).item() == pytest.approx((1 + 0 + 9) / 3, rel=1e-4)
    wide = outputs + torch.tensor([0.0, 0.5])
    assert head.bc_loss(wide, 0 * actions, mask).item() == pytest.approx(0.25, rel=1e-4)


def test_a_clones_std_has_the_entropy_that_sac_aims_at() -> None:
    normal = Normal(0.0, math.exp(CLONE_LOG_STD))
    assert float(normal.entropy()) == pytest.approx(-0.5)  # type: ignore[no-untyped-call]
