import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nightshift.algorithms.advantages import leave_one_out

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


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="K >= 2"):
        leave_one_out(torch.ones(4, 1))
