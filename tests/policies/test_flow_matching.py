"""The formulas of flow matching, against values by hand, published ones, and a case with a known answer."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nightshift.policies import flow_matching

MEAN, STD = 0.7, 0.4
"""Of Gaussian data, whose velocity field is known."""
Step = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def test_training_times_are_beta_distributed_and_never_zero() -> None:
    torch.testing.assert_close(
        flow_matching.training_times(torch.tensor([0.0, 0.125, 1.0])), torch.tensor([0.001, 0.25 * 0.999 + 0.001, 1.0])
    )
    grid = (torch.arange(100_000) + 0.5) / 100_000
    times = (flow_matching.training_times(grid) - 0.001) / 0.999
    beta = torch.distributions.Beta(1.5, 1.0)
    torch.testing.assert_close(times.mean(), beta.mean, rtol=0, atol=1e-4)
    torch.testing.assert_close(times.var(), beta.variance, rtol=0, atol=1e-4)


def test_normal_numbers_are_quantiles_and_finite_for_every_number_that_torch_draws() -> None:
    uniform = torch.tensor([0.0, 0.5, 0.8413447, 1 - 2.0**-24])
    drawn = flow_matching.normal(uniform)
    torch.testing.assert_close(drawn[1:3], torch.tensor([0.0, 1.0]), rtol=0, atol=1e-5)
    assert drawn.isfinite().all()


def test_noisy_actions_go_from_actions_to_noise_along_the_velocity() -> None:
    actions, noise = torch.tensor([[[2.0]], [[2.0]], [[2.0]]]), torch.tensor([[[1.0]], [[1.0]], [[1.0]]])
    noisy, velocity = flow_matching.interpolate(actions, noise, torch.tensor([0.0, 0.25, 1.0]))
    assert noisy.flatten().tolist() == [2.0, 1.75, 1.0]
    assert velocity.flatten().tolist() == [-1.0, -1.0, -1.0]


@pytest.mark.parametrize(
    ("steps", "stds"),
    [
        (3, [0.5, 0.408248, 0.204124]),
        (4, [0.5, 0.433013, 0.25, 0.144338]),
        (5, [0.5, 0.447214, 0.273861, 0.182574, 0.111803]),
    ],
)
def test_the_noise_of_every_step_is_that_of_rlinf(steps: int, stds: list[float]) -> None:
    times = flow_matching.schedule(steps)
    found = flow_matching.sde_sigma(times, 0.5) * (times[:-1] - times[1:]).sqrt()
    torch.testing.assert_close(found, torch.tensor(stds), rtol=0, atol=1e-6)


def test_the_mean_of_a_step_is_the_mix_of_data_and_noise_of_rlinf() -> None:
    generator = torch.Generator().manual_seed(0)
    noisy, velocity = torch.randn(2, 50, generator=generator)
    times = flow_matching.schedule(4)
    for time, after, sigma in zip(times, times[1:], flow_matching.sde_sigma(times, 0.5), strict=False):
        delta = time - after
        data, noise = noisy - velocity * time, noisy + velocity * (1 - time)
        expected = data * (1 - (time - delta)) + noise * (time - delta - sigma**2 * delta / (2 * time))
        torch.testing.assert_close(
            flow_matching.sde_mean(noisy, velocity, time, delta, sigma), expected, rtol=0, atol=1e-6
        )


def test_without_noise_a_step_of_the_sde_is_eulers() -> None:
    noisy, velocity = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    for time in flow_matching.schedule(4)[:-1]:
        delta = torch.tensor(0.25)
        after = flow_matching.sde_mean(noisy, velocity, time, delta, torch.zeros(()))
        assert torch.equal(after, flow_matching.ode_step(noisy, velocity, delta))


def test_times_are_embedded_as_in_openpi() -> None:
    found = flow_matching.time_embedding(torch.tensor([1.0, 0.5]), 4)  # periods 0.004 and 4
    expected = torch.tensor([[0.0, 1.0, 1.0, 0.0], [0.0, math.sqrt(0.5), 1.0, math.sqrt(0.5)]])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_a_log_prob_is_that_of_torch() -> None:
    values, mean, std = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    expected = torch.distributions.Normal(mean, std.exp())
    torch.testing.assert_close(flow_matching.normal_log_prob(values, mean, std.exp()), expected.log_prob(values))  # type: ignore[no-untyped-call]
    torch.testing.assert_close(flow_matching.normal_entropy(std.exp()), expected.entropy())  # type: ignore[no-untyped-call]


def right(noisy: Tensor, velocity: Tensor, time: Tensor, delta: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    return flow_matching.sde_mean(noisy, velocity, time, delta, sigma), sigma * delta.sqrt()


def ode(noisy: Tensor, velocity: Tensor, time: Tensor, delta: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    return flow_matching.ode_step(noisy, velocity, delta), torch.zeros_like(sigma)


def wrong_sign(noisy: Tensor, velocity: Tensor, time: Tensor, delta: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    euler, (mean, std) = flow_matching.ode_step(noisy, velocity, delta), right(noisy, velocity, time, delta, sigma)
    return 2 * euler - mean, std


def no_noise(noisy: Tensor, velocity: Tensor, time: Tensor, delta: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    mean, std = right(noisy, velocity, time, delta, sigma)
    return mean, torch.zeros_like(std)


def no_correction(noisy: Tensor, velocity: Tensor, time: Tensor, delta: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    return flow_matching.ode_step(noisy, velocity, delta), sigma * delta.sqrt()


def distribution_after(step: Step, steps: int = 2000, level: float = 0.2) -> tuple[float, float]:
    """Mean and std of the actions. The velocity field of Gaussian data is linear in the noisy actions, so all of them
    stay Gaussian, and how a step changes mean and variance follows from what it does to two values."""
    times = flow_matching.schedule(steps).double()
    mean, variance = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    for number, sigma in enumerate(flow_matching.sde_sigma(times, level)):
        time, delta = times[number], times[number] - times[number + 1]
        probes = torch.tensor([0.0, 1.0], dtype=torch.float64)
        (at_zero, at_one), std = step(probes, velocity_of_gaussian(probes, time), time, delta, sigma)
        mean, variance = at_zero + (at_one - at_zero) * mean, (at_one - at_zero) ** 2 * variance + std**2
    return mean.item(), variance.sqrt().item()


def velocity_of_gaussian(noisy: Tensor, time: Tensor) -> Tensor:
    """The mean of noise - data given the noisy value, where data are N(MEAN, STD²)."""
    variance = time**2 + (1 - time) ** 2 * STD**2
    return -MEAN + (time - (1 - time) * STD**2) / variance * (noisy - (1 - time) * MEAN)


@pytest.mark.parametrize("step", [ode, right])
def test_ode_and_sde_turn_noise_into_the_distribution_of_gaussian_data(step: Step) -> None:
    assert distribution_after(step) == pytest.approx((MEAN, STD), abs=2e-3)


@pytest.mark.parametrize("step", [wrong_sign, no_noise, no_correction])
def test_a_wrong_drift_or_missing_noise_would_be_seen(step: Step) -> None:
    assert distribution_after(step) != pytest.approx((MEAN, STD), abs=2e-2)
