"""The losses of RLPD as pure functions. E critics, B transitions."""

from __future__ import annotations

from torch import Tensor


def td_target(rewards: Tensor, discounts: Tensor, next_values: Tensor, entropy_cost: Tensor | None) -> Tensor:
    """[B]: the reward, and the discounted minimum of `next_values` [K, B] over the K critics drawn.

    `discounts` [B] are zero after termination, and only there: a time limit does not end what the task is worth.
    `entropy_cost` [B] is the temperature times the log-prob of the next action; None backs up no entropy.
    """
    values = next_values.amin(0)
    return rewards + discounts * (values if entropy_cost is None else values - entropy_cost)


def critic_loss(values: Tensor, targets: Tensor) -> Tensor:
    """The mean over critics and transitions of the squared error of `values` [E, B] to `targets` [B]."""
    return (values - targets).square().mean()


def actor_loss(values: Tensor, log_probs: Tensor, temperature: Tensor) -> Tensor:
    """The entropy cost minus the value of the actor's own actions: `values` [E, B], averaged over all critics."""
    return (temperature * log_probs - values.mean(0)).mean()


def temperature_loss(temperature: Tensor, log_probs: Tensor, target_entropy: float) -> Tensor:
    """Its gradient raises the temperature where the entropy is below the target."""
    return temperature * (-log_probs.mean() - target_entropy).detach()
