"""Flow matching: the formulas that every flow policy shares.

Time runs from 1, where actions are standard normal noise, to 0, where they are actions (as in pi0). Between them
x_t = t noise + (1 - t) actions, and the network learns the velocity, the mean of noise - actions given x_t. A chain of
N denoising steps follows the velocity from noise to actions.

For reinforcement learning steps of the chain are Gaussian, so that they have log-probs. Flow-SDE (Flow-GRPO, pi_RL)
adds noise and corrects the drift for it: the SDE has the same distribution of x_t at every time as the ODE.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_TIME_POWER = 1.5
"""Training times are Beta(1.5, 1): most are near noise, where the observation decides most."""
_TIME_SCALE, _TIME_OFFSET = 0.999, 0.001
"""No training time is 0, where there is nothing to denoise."""
_MIN_PERIOD, _MAX_PERIOD = 4e-3, 4.0
_HALF_STEP = 2.0**-25
"""Half the distance of two numbers that torch.rand draws: none of them becomes an infinite normal number."""


def training_times(uniform: Tensor) -> Tensor:
    """Times of the loss from uniform numbers, by the inverse of the distribution function t^1.5."""
    return uniform.pow(1 / _TIME_POWER) * _TIME_SCALE + _TIME_OFFSET


def normal(uniform: Tensor) -> Tensor:
    """Standard normal numbers from numbers of torch.rand."""
    drawn: Tensor = torch.special.ndtri(uniform.double() + _HALF_STEP)
    return drawn.to(uniform.dtype)


def interpolate(actions: Tensor, noise: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
    """Noisy actions at `times` [B], and the velocity there that the network is to learn: both [B, C, A]."""
    times = times[:, None, None]
    return times * noise + (1 - times) * actions, noise - actions


def schedule(steps: int) -> Tensor:
    """The times of a chain: N + 1 from 1 to 0."""
    return torch.linspace(1, 0, steps + 1, dtype=torch.float64).float()


def sde_sigma(times: Tensor, level: float) -> Tensor:
    """The diffusion coefficient [N] of each step, level √(t / (1 - t)). It is infinite at t = 1, where the time after
    the first step takes the place of t in the denominator."""
    start = times[:-1]
    return level * (start / (1 - torch.minimum(start, times[1]))).sqrt()


def ode_step(noisy: Tensor, velocity: Tensor, delta: Tensor | float) -> Tensor:
    """Euler's step to the time t - delta."""
    return noisy - delta * velocity


def sde_mean(noisy: Tensor, velocity: Tensor, time: Tensor, delta: Tensor, sigma: Tensor) -> Tensor:
    """The mean after a step of the SDE, to which sigma √delta times standard normal noise is added.

    noisy + (1 - t) velocity is the noise that the network sees in `noisy`; the score is minus that, divided by t.
    """
    score = -(noisy + (1 - time) * velocity) / time
    return ode_step(noisy, velocity, delta) + 0.5 * sigma.square() * delta * score


def normal_log_prob(values: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    return -0.5 * ((values - mean) / std).square() - std.log() - 0.5 * math.log(2 * math.pi)


def normal_entropy(std: Tensor) -> Tensor:
    return std.log() + 0.5 * math.log(2 * math.pi * math.e)


def time_embedding(times: Tensor, size: int) -> Tensor:
    """Sines and cosines of times [B] with periods from 0.004 to 4, [B, size]; in double precision, as in openpi."""
    fraction = torch.linspace(0, 1, size // 2, dtype=torch.float64, device=times.device)
    period = _MIN_PERIOD * (_MAX_PERIOD / _MIN_PERIOD) ** fraction
    angles = times.double()[:, None] * (2 * math.pi / period)
    return torch.cat([angles.sin(), angles.cos()], dim=1).float()
