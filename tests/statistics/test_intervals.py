import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift.statistics.intervals import Rate, of_difference, over_runs

rates = st.integers(1, 500).flatmap(lambda n: st.builds(Rate, st.integers(0, n), st.just(n)))


@pytest.mark.parametrize(
    ("rate", "low", "high"),
    # Wilson (1927) without continuity correction, worked out apart from this code.
    [(Rate(0, 10), 0.0, 0.277533), (Rate(5, 10), 0.236593, 0.763407), (Rate(98, 100), 0.929989, 0.994498)],
)
def test_golden_wilson_intervals(rate: Rate, low: float, high: float) -> None:
    assert rate.low == pytest.approx(low, abs=1e-5)
    assert rate.high == pytest.approx(high, abs=1e-5)


def test_golden_interval_of_a_difference() -> None:
    """56 of 70 against 48 of 80: the first example of Newcombe (1998), table II, method 10."""
    assert of_difference(Rate(56, 70), Rate(48, 80)) == pytest.approx((0.0524, 0.3339), abs=5e-5)


@given(rates)
def test_the_interval_solves_wilsons_equation(rate: Rate) -> None:
    """Its ends are the rates p for which the observed rate is 1.96 standard errors of p away."""
    z = 1.959963984540054
    for end in (rate.low, rate.high):
        assert (rate.rate - end) ** 2 == pytest.approx(z**2 * end * (1 - end) / rate.episodes, abs=1e-12)


@given(rates)
def test_the_interval_holds_the_rate_and_stays_between_0_and_1(rate: Rate) -> None:
    assert 0 <= rate.low <= rate.rate + 1e-12
    assert rate.rate - 1e-12 <= rate.high <= 1


@given(rates)
def test_more_episodes_at_the_same_rate_make_it_surer(rate: Rate) -> None:
    more = Rate(rate.successes * 4, rate.episodes * 4)
    assert more.high - more.low < rate.high - rate.low


def test_golden_interval_over_runs() -> None:
    # Student's t of two degrees of freedom is 4.302653 at 97.5 %, the standard deviation 0.1.
    low, high = over_runs([0.4, 0.5, 0.6])
    assert (low, high) == pytest.approx((0.5 - 0.248414, 0.5 + 0.248414), abs=1e-6)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=6))
def test_the_interval_over_runs_holds_their_mean_and_stays_between_0_and_1(scores: list[float]) -> None:
    low, high = over_runs(scores)
    assert 0 <= low <= np.mean(scores) + 1e-9
    assert np.mean(scores) - 1e-9 <= high <= 1


def test_one_run_says_nothing_about_others_and_runs_that_agree_leave_no_doubt() -> None:
    assert over_runs([0.9]) == (0, 1)
    assert over_runs([0.9, 0.9, 0.9]) == pytest.approx((0.9, 0.9))
