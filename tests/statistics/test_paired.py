"""The paired test between two policies: golden values from elsewhere and properties that hold for all outcomes."""

from __future__ import annotations

from fractions import Fraction
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from nightshift.statistics.paired import Cell, EpisodeOutcome, Paired, Repeated, solved

pairs = st.tuples(*[st.integers(0, 60)] * 3).map(lambda n: Paired(states=sum(n), won=n[0], lost=n[1]))
outcomes = st.dictionaries(st.tuples(st.sampled_from(["near", "far"]), st.integers(0, 9)), st.booleans())

rounds = st.lists(st.tuples(outcomes, outcomes), min_size=1, max_size=5)


def test_golden_p_value() -> None:
    # Of 16 fair coins 14, 15 or 16 show heads in 120 + 16 + 1 of 65536 cases.
    assert Paired(states=198, won=14, lost=2).p_value == pytest.approx(137 / 65536, rel=1e-12)


@given(pairs)
def test_the_p_value_is_the_exact_binomial_tail(pair: Paired) -> None:
    discordant = pair.won + pair.lost
    tail = Fraction(sum(comb(discordant, k) for k in range(pair.won, discordant + 1)), 2**discordant)
    assert pair.p_value == pytest.approx(float(tail), rel=1e-9)
    if discordant:
        assert pair.p_value == binomtest(pair.won, discordant, alternative="greater").pvalue


def test_golden_interval_of_the_gain() -> None:
    # ci.prop.ps(.05, 12, 4, 26, 6) of the R package statpsych, by the authors of the method.
    assert Paired(states=48, won=26, lost=4).interval == pytest.approx((0.2548067, 0.6251933), abs=1e-7)


@given(pairs)
def test_the_interval_holds_the_gain_and_has_a_width(pair: Paired) -> None:
    low, high = pair.interval
    assert -1 <= low <= pair.gain <= high <= 1
    assert low < high


@given(outcomes, outcomes)
def test_swapping_the_policies_swaps_wins_and_losses_and_mirrors_gain_and_interval(
    ours: dict[Cell, bool], theirs: dict[Cell, bool]
) -> None:
    pair, swapped = Paired.between(ours, theirs), Paired.between(theirs, ours)
    assert swapped == pair.swapped
    assert (swapped.won, swapped.lost, swapped.states) == (pair.lost, pair.won, pair.states)
    assert swapped.gain == -pair.gain
    assert swapped.interval == pytest.approx((-pair.interval[1], -pair.interval[0]), abs=1e-12)


@given(outcomes)
def test_a_policy_does_not_differ_from_itself(ours: dict[Cell, bool]) -> None:
    assert Paired.between(ours, ours) == Paired(states=len(ours), won=0, lost=0)
    assert Paired.between(ours, ours).p_value == 1


@given(outcomes, outcomes)
def test_only_states_that_both_have_count(ours: dict[Cell, bool], theirs: dict[Cell, bool]) -> None:
    common = ours.keys() & theirs.keys()
    pair = Paired.between(ours, theirs)
    assert pair.states == len(common)
    assert pair.won - pair.lost == sum(ours[c] for c in common) - sum(theirs[c] for c in common)


def test_an_invalid_episode_is_not_an_outcome() -> None:
    def episode(state: int, success: bool, valid: bool) -> EpisodeOutcome:
        return {"task": "near", "init_state": state, "success": success, "length": 3, "valid": valid}

    played = [episode(0, True, True), episode(1, False, True), episode(2, False, False)]
    assert solved(played) == {("near", 0): True, ("near", 1): False}


@given(outcomes, outcomes, st.integers(1, 5))
def test_the_same_outcomes_again_say_nothing_new(ours: dict[Cell, bool], theirs: dict[Cell, bool], times: int) -> None:
    """With one time: played once, it is the paired test itself."""
    once, repeated = Paired.between(ours, theirs), Repeated.between([(ours, theirs)] * times)
    assert repeated.interval == pytest.approx(once.interval, abs=1e-9)
    assert repeated.p_value == pytest.approx(once.p_value, rel=1e-9)
    assert repeated.total == Paired(states=times * once.states, won=times * once.won, lost=times * once.lost)
    assert repeated.to_json()["gain"] == pytest.approx(once.gain)


@given(rounds)
def test_repeated_states_are_never_surer_than_independent_ones(
    played: list[tuple[dict[Cell, bool], dict[Cell, bool]]],
) -> None:
    repeated = Repeated.between(played)
    (low, high), (alone_low, alone_high) = repeated.interval, repeated.total.interval
    assert high - low >= alone_high - alone_low - 1e-12
    assert low - 1e-12 <= repeated.total.gain <= high + 1e-12
    assert 1 <= repeated.design_effect <= len(played)


def test_one_state_at_several_strengths_is_one_state() -> None:
    near = ("near", 0)
    played = [({near: solved}, {near: False}) for solved in (True, True, True, False, False)]
    assert Repeated.between(played).design_effect == len(played)


@given(rounds)
def test_the_sign_flip_test_counts_all_signs_of_the_states(
    played: list[tuple[dict[Cell, bool], dict[Cell, bool]]],
) -> None:
    repeated = Repeated.between(played)
    sums = [sum(own) for own in repeated.differences.values()]
    flipped = [0]
    for one in sums[:12]:
        flipped = [total + sign * one for total in flipped for sign in (-1, 1)]
    if len(sums) <= 12:
        expected = sum(total >= sum(sums) for total in flipped) / len(flipped)
        assert repeated.p_value == pytest.approx(expected, rel=1e-9)


def test_three_states_won_at_every_of_five_strengths_are_three_states() -> None:
    ours = {("near", state): True for state in range(50)}
    theirs = {("near", state): state >= 3 for state in range(50)}
    found = Repeated.between([(ours, theirs)] * 5).to_json()
    assert (found["won"], found["lost"], found["states"]) == (15, 0, 250)
    assert (found["low"], found["high"]) == pytest.approx((-0.0251, 0.1405), abs=1e-4)
    assert found["p_value"] == 0.125
