"""The threshold that reaches a precision, and the counts that it is judged by."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nightshift.errors import DataError
from nightshift.statistics.classification import Confusion, fewest_positives, threshold_for
from nightshift.statistics.intervals import Rate

SCORES = [0.9] * 40 + [0.6] * 10 + [0.55] * 9 + [0.1] * 41
POSITIVE = [True] * 50 + [False] * 50
"""40 clear successes, 10 among 9 negatives that look alike, and 41 clear negatives."""


def test_the_confusion_table_counts_every_case_once() -> None:
    found = Confusion.of(SCORES, POSITIVE, 0.57)
    assert found == Confusion(true_positives=50, false_positives=0, false_negatives=0, true_negatives=50)
    assert Confusion.of(SCORES, POSITIVE, 0.55).precision == Rate(50, 59)
    assert Confusion.of(SCORES, POSITIVE, 0.7).recall == Rate(40, 50)
    assert Confusion.of(SCORES, POSITIVE, 0.55).false_positive_rate == Rate(9, 50)


def test_a_table_without_accepted_cases_has_no_precision() -> None:
    found = Confusion.of(SCORES, POSITIVE, 1.0)
    assert found.precision is None
    assert found.to_json()["precision"] is None
    assert found.recall == Rate(0, 50)


def test_the_threshold_is_the_lowest_that_reaches_the_precision_and_lies_half_way_to_the_next_score() -> None:
    assert threshold_for(SCORES, POSITIVE, 0.9) == pytest.approx((0.6 + 0.55) / 2)
    swapped = [0.9] * 40 + [0.55] * 10 + [0.6] * 9 + [0.1] * 41
    assert threshold_for(swapped, POSITIVE, 0.9) == pytest.approx((0.9 + 0.6) / 2), "nine false positives are too many"


def test_a_negative_is_not_accepted_if_that_finds_no_further_success() -> None:
    """59 of 60 would still reach 0.9, and gain nothing over 59 of 59."""
    scores, positive = [0.9] * 59 + [0.3] + [0.1] * 40, [True] * 59 + [False] * 41
    assert Rate(59, 60).low >= 0.9
    assert threshold_for(scores, positive, 0.9) == pytest.approx(0.6)


def test_the_precision_counts_by_the_lower_end_of_its_interval() -> None:
    count = fewest_positives(0.9)
    assert count == 35
    assert Rate(count, count).low >= 0.9 > Rate(count - 1, count - 1).low
    threshold_for([0.9] * count + [0.1], [True] * count + [False], 0.9)
    with pytest.raises(DataError, match=re.escape("the best is 100%, and at least 90% with 95% confidence")) as refusal:
        threshold_for([0.9] * (count - 1) + [0.1], [True] * (count - 1) + [False], 0.9)
    assert "it takes 35 successes to show that, and there are 34: record more episodes" in refusal.value.next_step


def test_a_target_that_mistakes_put_out_of_reach_is_refused_with_what_was_reached() -> None:
    scores, positive = [0.5] * 100 + [0.6] * 100, [True] * 100 + [False] * 100
    with pytest.raises(DataError, match=r"on 100 successes and 100 stretches .*: the best is 50%") as error:
        threshold_for(scores, positive, 0.9)
    assert "failures like those it takes for successes" in error.value.next_step


@given(
    cases=st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=60),
    precision=st.floats(0.05, 0.95),
)
@example(cases=[(5e-324, True), (0.0, False)], precision=0.15)  # their mean is rounded to 0
def test_a_threshold_reaches_the_target_and_every_lower_one_that_finds_more_does_not(
    cases: list[tuple[float, bool]], precision: float
) -> None:
    scores, positive = [score for score, _ in cases], [label for _, label in cases]
    reached = []
    for candidate in {score for score, label in cases if label}:
        found = Confusion.of(scores, positive, candidate)
        if found.precision is not None and found.precision.low >= precision:
            reached.append(found.true_positives)
    if not reached:
        with pytest.raises(DataError):
            threshold_for(scores, positive, precision)
        return
    chosen = Confusion.of(scores, positive, threshold_for(scores, positive, precision))
    assert chosen.precision is not None
    assert chosen.precision.low >= precision
    assert chosen.true_positives == max(reached)
