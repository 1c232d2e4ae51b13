from __future__ import annotations

import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nightshift.algorithms.selection import Outcomes, Validation, best_trained, select


def outcomes(bits: str) -> Outcomes:
    """1 solved, 0 failed, x invalid."""
    return {("lift", state): bit == "1" for state, bit in enumerate(bits) if bit != "x"}


def validation(iteration: int, bits: str) -> Validation:
    return Validation(iteration=iteration, outcomes=outcomes(bits))


def test_the_policy_that_training_started_from_is_kept_until_another_is_clearly_better() -> None:
    start, slightly, clearly = validation(0, "1111000000"), validation(3, "1111110000"), validation(6, "1111111110")
    assert select([start], 0.1) is start
    assert select([start, slightly], 0.1) is start
    assert select([start, slightly, clearly], 0.1) is clearly
    assert select([start, clearly, validation(9, "1111000000")], 0.1) is clearly


def test_of_equally_good_trained_policies_the_latest_is_the_best() -> None:
    looks = [validation(0, "0000"), validation(2, "0111"), validation(4, "1110"), validation(6, "0110")]
    assert best_trained(looks) is looks[2]
    assert best_trained(looks[:1]) is None


@given(st.lists(st.text("01x", min_size=3, max_size=3), min_size=3, max_size=5))
@settings(max_examples=500)
def test_a_later_validation_takes_the_place_of_the_best_or_leaves_it(runs: list[str]) -> None:
    looks = [validation(index, bits) for index, bits in enumerate(runs)]
    assert best_trained(looks) in (best_trained(looks[:-1]), looks[-1]), "the weights of others are gone"


@given(st.lists(st.text("01", min_size=8, max_size=8), min_size=1, max_size=8), st.sampled_from([0.05, 0.1, 0.25]))
def test_what_is_kept_never_solves_fewer_states_than_the_start(runs: list[str], level: float) -> None:
    looks = [validation(index, bits) for index, bits in enumerate(runs)]
    assert select(looks, level).successes >= looks[0].successes


def test_equally_good_policies_rarely_replace_the_start() -> None:
    """Twelve validations of policies that are all solved 80 % of the time: chance alone must seldom move the choice."""
    random = np.random.default_rng(0)
    moved = 0
    for _ in range(300):
        runs = ["".join("01"[int(x)] for x in random.random(40) < 0.8) for _ in range(5)]
        moved += select([validation(i, bits) for i, bits in enumerate(runs)], 0.1).iteration > 0
    assert moved / 300 < 0.25


def test_a_validation_survives_json() -> None:
    one = validation(3, "0110")
    assert Validation.from_json(json.loads(json.dumps(one.to_json()))) == one
