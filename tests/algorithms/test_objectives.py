import torch
from hypothesis import given
from hypothesis import strategies as st

from nightshift.algorithms.objectives import clipped_surrogate, kl_divergence


def test_golden_values_of_the_clipped_objective() -> None:
    log_probs = torch.tensor([0.0, 0.4, -0.5])
    surrogate = clipped_surrogate(
        log_probs, torch.zeros(3), torch.tensor([1.0, 1.0, -1.0]), clip_low=0.2, clip_high=0.28
    )
    assert abs(surrogate.loss.item() - -0.4933333) < 1e-6
    assert abs(surrogate.clipped.item() - 0.6666667) < 1e-6
    assert abs(surrogate.drift.item() - 0.0333333) < 1e-6


def test_a_clipped_step_has_no_gradient() -> None:
    log_probs = torch.tensor([0.5, -0.5], requires_grad=True)
    surrogate = clipped_surrogate(log_probs, torch.zeros(2), torch.tensor([1.0, -1.0]), clip_low=0.2, clip_high=0.28)
    (gradient,) = torch.autograd.grad(surrogate.loss, log_probs)
    assert gradient.abs().max() == 0


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=20))
def test_kl_estimate_is_never_negative_and_zero_without_a_move(moves: list[float]) -> None:
    old = torch.zeros(len(moves), dtype=torch.float64)
    assert kl_divergence(torch.tensor(moves, dtype=torch.float64), old) >= 0
    assert kl_divergence(old, old) == 0
