import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from nightshift.reports.intervals import Rate, over_runs

rates = st.integers(1, 500).flatmap(lambda n: st.builds(Rate, st.integers(0, n), st.just(n)))


@pytest.mark.parametrize(
    ("rate", "low", "high"),
    # Wilson (1927) without continuity correction, worked out apart from this code.
    [(Rate(0, 10), 0.0, 0.277533), (Rate(5, 10), 0.236593, 0.763407), (Rate(98, 100), 0.929989, 0.994498)],
)
def test_golden_wilson_intervals(rate: Rate, low: float, high: float) -> None:
    assert rate.low == pytest.approx(low, abs=1e-5)
    assert rate.high == pytest.approx(high, abs=1e-5)


@given(rates)
def test_the_interval_holds_the_rate_and_stays_between_0_and_1(rate: Rate) -> None:
    assert 0 <= rate.low <= rate.rate + 1e-12
    assert rate.rate - 1e-12 <= rate.high <= 1


@given(rates)
def test_more_episodes_at_the_same_rate_make_it_surer(rate: Rate) -> None:
    more = Rate(rate.successes * 4, rate.episodes * 4)
    assert more.high - more.low < rate.high - rate.low


def test_golden_interval_over_runs() -> None:
    # Two runs of one task: a resample is (0, 0), a mix or (1, 1), with chances 1/4, 1/2 and 1/4.
    assert over_runs(np.array([[0.0], [1.0]])) == (0.0, 1.0)
    # Ten tasks, half of the runs solve each: the mean of 20 coins lies between 6 and 14 heads in 95 % of all cases.
    assert over_runs(np.repeat([[0.0], [1.0]], 10, axis=1)) == pytest.approx((0.3, 0.7), abs=0.025)


@given(arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(1, 6)), elements=st.floats(0, 1)))
def test_the_interval_over_runs_holds_their_mean_and_knows_no_luck(scores: NDArray[np.float64]) -> None:
    low, high = over_runs(scores)
    assert low <= scores.mean() + 1e-9
    assert scores.mean() - 1e-9 <= high
    assert over_runs(scores) == (low, high)


def test_runs_that_agree_leave_no_doubt_however_much_tasks_differ() -> None:
    assert over_runs(np.array([[0.2, 0.9]] * 3)) == pytest.approx((0.55, 0.55))
