import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nightshift import config
from nightshift.algorithms.objectives import (
    AdaptiveKlCoef,
    KlForm,
    RatioLevel,
    approx_kl,
    clipped_surrogate,
    elements,
    kl_penalty,
)

CLIP = config.Clip(low=0.2, high=0.28, dual=None, log_ratio=None)


def test_golden_values_of_the_clipped_objective() -> None:
    log_probs = torch.tensor([0.0, 0.4, -0.5])
    surrogate = clipped_surrogate(log_probs, torch.zeros(3), torch.tensor([1.0, 1.0, -1.0]), CLIP)
    assert abs(surrogate.losses.mean().item() - -0.4933333) < 1e-6
    assert abs(surrogate.clipped.float().mean().item() - 0.6666667) < 1e-6
    assert abs(surrogate.ppo_kl.mean().item() - 0.0333333) < 1e-6


def test_a_clipped_step_has_no_gradient() -> None:
    log_probs = torch.tensor([0.5, -0.5], requires_grad=True)
    surrogate = clipped_surrogate(log_probs, torch.zeros(2), torch.tensor([1.0, -1.0]), CLIP)
    (gradient,) = torch.autograd.grad(surrogate.losses.sum(), log_probs)
    assert gradient.abs().max() == 0


def test_the_dual_clip_bounds_the_loss_of_a_negative_advantage() -> None:
    far = torch.tensor([math.log(10.0)] * 2)
    advantages = torch.tensor([-1.0, 1.0])
    losses = clipped_surrogate(far, torch.zeros(2), advantages, CLIP.model_copy(update={"dual": 3.0})).losses
    torch.testing.assert_close(losses, torch.tensor([3.0, -1.28]))
    assert clipped_surrogate(far, torch.zeros(2), advantages, CLIP).losses[0] == pytest.approx(10)


def test_the_log_ratio_clamp_keeps_the_ratio_finite() -> None:
    far = torch.tensor([200.0])
    assert clipped_surrogate(far, torch.zeros(1), torch.tensor([-1.0]), CLIP).losses.isfinite()
    clip = CLIP.model_copy(update={"log_ratio": 2.0})
    bounded = clipped_surrogate(far, torch.zeros(1), torch.tensor([-1.0]), clip).losses
    torch.testing.assert_close(bounded, torch.tensor([math.exp(2)]))


@pytest.mark.parametrize(
    ("level", "expected", "counted"),
    [
        ("token", [[1.0, 2, 3, 4], [5, 6, 0, 0]], [[True] * 4, [True, True, False, False]]),
        ("action", [[3.0, 7], [11, 0]], [[True, True], [True, False]]),
        ("chunk", [[10.0], [11]], [[True], [True]]),
    ],
)
def test_elements_hold_executed_actions_and_nothing_after_them(
    level: RatioLevel, expected: list[list[float]], counted: list[list[bool]]
) -> None:
    log_probs = torch.tensor([[[1.0, 2], [3, 4]], [[5, 6], [7, 8]]])
    mask = torch.tensor([[True, True], [True, False]])
    values, which = elements(log_probs, mask, level)
    torch.testing.assert_close(values, torch.tensor(expected))
    assert which.tolist() == counted


@pytest.mark.parametrize(
    ("form", "expected"), [("k1", 0.5), ("abs", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) + 0.5 - 1)]
)
def test_golden_values_of_the_kl_forms(form: KlForm, expected: float) -> None:
    assert kl_penalty(torch.tensor([0.5]), torch.tensor([0.0]), form).item() == pytest.approx(expected)


@pytest.mark.parametrize("form", ["k1", "k2", "k3", "abs"])
def test_every_kl_form_pulls_towards_the_reference(form: KlForm) -> None:
    log_probs = torch.tensor([0.5, -0.5], requires_grad=True)
    (gradient,) = torch.autograd.grad(kl_penalty(log_probs, torch.zeros(2), form).sum(), log_probs)
    assert gradient[0] > 0 > gradient[1]


def test_k3_stays_finite_however_far_apart_the_policies_are() -> None:
    assert kl_penalty(torch.tensor([-1000.0]), torch.tensor([0.0]), "k3").item() == 10


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=20))
def test_kl_estimate_is_never_negative_and_zero_without_a_move(moves: list[float]) -> None:
    old = torch.zeros(len(moves), dtype=torch.float64)
    assert (approx_kl(torch.tensor(moves, dtype=torch.float64), old) >= 0).all()
    assert not approx_kl(old, old).any()


def test_an_adaptive_kl_coefficient_rises_and_falls_with_the_kl_and_is_bounded() -> None:
    coef = AdaptiveKlCoef(1.0, target=0.1, horizon=100)
    coef.observe(10.0, 50)
    assert coef.value == pytest.approx(1 + 0.2 * 0.5)
    coef.observe(0.0, 50)
    assert coef.value == pytest.approx(1.1 * (1 - 0.2 * 0.5))
    coef.observe(float("nan"), 50)
    coef.observe(0.0, 10**9)
    assert coef.value == pytest.approx(1.1 * 0.9 * 0.8)


def test_a_fixed_kl_coefficient_stays() -> None:
    coef = AdaptiveKlCoef(1.0, target=None, horizon=100)
    coef.observe(10.0, 50)
    assert coef.value == 1
