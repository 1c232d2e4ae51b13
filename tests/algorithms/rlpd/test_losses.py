"""RLPD's losses against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from nightshift.algorithms.rlpd.losses import actor_loss, critic_loss, td_target, temperature_loss

REWARDS = torch.tensor([1.0, 0.0, 0.0])
DISCOUNTS = torch.tensor([0.0, 0.99, 0.99])  # terminated; truncated; in the middle
NEXT_VALUES = torch.tensor([[5.0, 2.0, 3.0], [4.0, 6.0, 1.0]])


def test_the_target_is_the_reward_and_the_discounted_minimum_of_the_critics_drawn() -> None:
    torch.testing.assert_close(td_target(REWARDS, DISCOUNTS, NEXT_VALUES, None), torch.tensor([1.0, 1.98, 0.99]))


def test_a_backed_up_entropy_is_discounted_and_masked_as_the_value_is() -> None:
    cost = 0.5 * torch.tensor([-1.0, 2.0, -3.0])
    expected = torch.tensor([1.0, 0.99 * (2 - 1), 0.99 * (1 + 1.5)])
    torch.testing.assert_close(td_target(REWARDS, DISCOUNTS, NEXT_VALUES, cost), expected)


def test_the_critics_loss_is_a_mean_over_critics_and_transitions() -> None:
    values, targets = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1.0, 1.0])
    assert critic_loss(values, targets).item() == pytest.approx((0 + 1 + 4 + 9) / 4)


def test_the_actor_follows_the_mean_of_all_critics_not_their_minimum() -> None:
    values, log_probs = torch.tensor([[1.0, 2.0], [3.0, 6.0]]), torch.tensor([-1.0, 3.0])
    expected = (0.5 * -1 - 2 + 0.5 * 3 - 4) / 2
    assert actor_loss(values, log_probs, torch.tensor(0.5)).item() == pytest.approx(expected)


@pytest.mark.parametrize(("entropy", "rises"), [(-4.0, True), (-3.0, False)])
def test_the_temperature_rises_below_the_target_entropy_and_falls_above(entropy: float, rises: bool) -> None:
    log_value = torch.tensor(math.log(0.1), requires_grad=True)
    loss = temperature_loss(log_value.exp(), -torch.full((2,), entropy), target_entropy=-3.5)
    assert loss.item() == pytest.approx(0.1 * (entropy + 3.5))
    (gradient,) = torch.autograd.grad(loss, log_value)
    assert (gradient < 0) == rises
