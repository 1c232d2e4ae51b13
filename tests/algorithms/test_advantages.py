from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nightshift.algorithms.advantages import (
    gae,
    group_relative,
    leave_one_out,
    leave_one_out_of_batch,
    normalise,
    whiten,
)
from nightshift.algorithms.collective import global_moments
from nightshift.algorithms.strategy import SingleProcess

groups = st.integers(2, 9).flatmap(
    lambda k: st.lists(st.lists(st.floats(-5, 5), min_size=k, max_size=k), min_size=1, max_size=5)
)


def test_golden_values_of_a_group_of_eight() -> None:
    advantages = leave_one_out(torch.tensor([[1.0, 0, 0, 1, 1, 1, 1, 0]]))
    expected = [0.4285714, -0.7142857, -0.7142857, 0.4285714, 0.4285714, 0.4285714, 0.4285714, -0.7142857]
    torch.testing.assert_close(advantages, torch.tensor([expected]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("outcome", [0.0, 1.0])
def test_a_group_with_one_outcome_teaches_nothing(outcome: float) -> None:
    assert leave_one_out(torch.full((3, 8), outcome)).abs().max() == 0


@given(groups)
def test_equals_the_scaled_distance_from_the_mean(returns: list[list[float]]) -> None:
    values = torch.tensor(returns, dtype=torch.float64)
    k = values.shape[1]
    scaled = (values - values.mean(dim=1, keepdim=True)) * k / (k - 1)
    torch.testing.assert_close(leave_one_out(values), scaled, atol=1e-9, rtol=1e-9)


@given(groups)
def test_advantages_of_a_group_sum_to_zero(returns: list[list[float]]) -> None:
    sums = leave_one_out(torch.tensor(returns, dtype=torch.float64)).sum(dim=1)
    torch.testing.assert_close(sums, torch.zeros_like(sums), atol=1e-9, rtol=0)


@pytest.mark.parametrize("estimator", [leave_one_out, group_relative])
def test_a_group_of_one_is_refused(estimator: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="K >= 2"):
        estimator(torch.ones(4, 1))


def test_leaving_one_out_of_one_is_refused() -> None:
    one = torch.ones(1)
    with pytest.raises(ValueError, match="K >= 2"):
        leave_one_out_of_batch(one, global_moments(SingleProcess(), one))


def test_golden_values_of_grpo() -> None:
    advantages = group_relative(torch.tensor([[5.0, 0, 5, 0], [1, 1, 1, 1]]))
    expected = torch.tensor([[0.8660251, -0.8660251, 0.8660251, -0.8660251], [0, 0, 0, 0]])
    torch.testing.assert_close(advantages, expected, atol=1e-6, rtol=0)
    assert not advantages[1].any()


@given(groups)
def test_leaving_one_out_of_all_is_leaving_one_out_of_one_large_group(returns: list[list[float]]) -> None:
    values = torch.tensor(returns, dtype=torch.float64)
    expected = leave_one_out(values.reshape(1, -1)).reshape(values.shape)
    moments = global_moments(SingleProcess(), values.flatten())
    torch.testing.assert_close(leave_one_out_of_batch(values, moments), expected, atol=1e-9, rtol=1e-9)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=30))
def test_whitened_steps_have_mean_zero_and_variance_one_unless_all_are_equal(values: list[float]) -> None:
    raw = torch.tensor(values, dtype=torch.float64)
    white = whiten(raw, global_moments(SingleProcess(), raw))
    assert abs(white.mean()) < 1e-6
    if raw.var(correction=0) > 1e-6:
        assert abs(white.square().mean() - 1) < 1e-4


def test_normalised_advantages_divide_by_the_unbiased_deviation() -> None:
    raw = torch.tensor([1.0, 2.0, 4.0])
    torch.testing.assert_close(
        normalise(raw, global_moments(SingleProcess(), raw)), (raw - raw.mean()) / (raw.std() + 1e-5)
    )


def naive_gae(rewards: list[float], values: list[float], gamma: float, gae_lambda: float) -> list[float]:
    deltas = [r + gamma * values[t + 1] - values[t] for t, r in enumerate(rewards)]
    decay = gamma * gae_lambda
    return [sum(decay ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4), st.floats(0.5, 1), st.floats(0, 1), st.integers(0, 2**31 - 1)
)
def test_gae_equals_its_definition_for_episodes_of_any_length_whatever_the_padding_holds(
    lengths: list[int], gamma: float, gae_lambda: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(len(lengths), max(lengths), generator=generator, dtype=torch.float64)
    values = torch.randn(len(lengths), max(lengths) + 1, generator=generator, dtype=torch.float64)
    for row, length in enumerate(lengths):
        rewards[row, length:] = torch.nan
        values[row, length + 1 :] = torch.inf
    advantages = gae(rewards, values, torch.tensor(lengths), gamma=gamma, gae_lambda=gae_lambda)
    for row, length in enumerate(lengths):
        expected = naive_gae(rewards[row, :length].tolist(), values[row, : length + 1].tolist(), gamma, gae_lambda)
        torch.testing.assert_close(advantages[row, :length], torch.tensor(expected, dtype=torch.float64))
        assert not advantages[row, length:].any()
