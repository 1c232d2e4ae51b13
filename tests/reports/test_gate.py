"""The rules of the gate, on plain numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift.errors import RolloutError
from nightshift.reports import gate
from nightshift.statistics.intervals import Rate
from nightshift.statistics.paired import Cell, EpisodeOutcome, Paired, solved

RULES = gate.Rules(level=0.05, min_success_rate=0.1, max_task_drop=0.1)
levels = st.floats(1e-6, 0.5)


def episodes(results: str) -> list[EpisodeOutcome]:
    """One per letter: s solved, f failed, i invalid."""
    return [
        {"task": "near", "init_state": i, "success": letter == "s", "length": 9, "valid": letter != "i"}
        for i, letter in enumerate(results)
    ]


def cells(**results: str) -> dict[Cell, bool]:
    """By task, one state per letter: s solved, f failed."""
    return {(task, i): letter == "s" for task, letters in results.items() for i, letter in enumerate(letters)}


def decided(ours: str, theirs: str) -> gate.Decision:
    return gate.compare("version 4 (rloo)", "version 3", solved(episodes(ours)), solved(episodes(theirs)), RULES)


def apart(won: int, lost: int, agreed: int) -> tuple[dict[Cell, bool], dict[Cell, bool]]:
    """Two policies on one task, the first of which won and lost so many states."""
    return cells(near="s" * won + "f" * lost + "s" * agreed), cells(near="f" * won + "s" * lost + "s" * agreed)


def test_a_decision_is_one_sentence_with_its_numbers() -> None:
    found = gate.compare("version 4 (rloo)", "version 3", *apart(14, 2, 182), RULES)
    assert found.promote
    assert found.reason == (
        "version 4 (rloo) becomes champion: of 198 states valid for both it solved 14 that version 3 failed "
        "and failed 2 that version 3 solved (exact p = 0.00209, level 0.05)"
    )


@pytest.mark.parametrize(
    "ours",
    [
        "s" * 179 + "fff" + "s" * 8 + "s" + "f" * 9,  # fails the same three of the states valid for both
        "ff" + "s" * 188 + "f" * 10,  # solves those three, fails two others
        "fff" + "s" * 187 + "s" + "f" * 9,  # solves those three, fails three others
    ],
)
def test_188_of_200_against_187_of_190_cannot_be_told(ours: str) -> None:
    theirs = "s" * 179 + "fff" + "s" * 8 + "i" * 10
    assert (ours.count("s"), len(ours), theirs.count("s"), 200 - theirs.count("i")) == (188, 200, 187, 190)
    found = decided(ours, theirs)
    assert not found.promote
    assert "cannot be told" in found.reason
    assert "of 190 states valid for both" in found.reason


@pytest.mark.parametrize("solved_before", [20, 93, 187, 199])
def test_one_episode_more_cannot_be_told(solved_before: int) -> None:
    theirs = "s" * solved_before + "f" * (200 - solved_before)
    ours = "s" * (solved_before + 1) + "f" * (199 - solved_before)
    found = decided(ours, theirs)
    assert not found.promote
    assert "cannot be told" in found.reason
    assert found.p_value == 0.5


def test_a_policy_that_is_clearly_worse_is_called_so() -> None:
    found = decided("s" * 5 + "f" * 15, "s" * 20)
    assert not found.promote
    assert "stays challenger, since it is worse than version 3" in found.reason
    assert found.verdict is gate.Verdict.WORSE


@pytest.mark.parametrize(("lost", "verdict"), [(5, gate.Verdict.NOT_PROMOTED), (9, gate.Verdict.WORSE)])
def test_worse_is_what_the_paired_test_says_of_the_champion(lost: int, verdict: gate.Verdict) -> None:
    """Won 1 and lost 5: the test of "better" has p = 0.98, but that of "worse" has p = 0.11."""
    found = gate.compare("version 4 (rloo)", "version 3", *apart(1, lost, 50), RULES)
    assert (found.verdict, "is worse than" in found.reason) == (verdict, verdict is gate.Verdict.WORSE)


def test_a_collapse_below_the_bar_is_worse_too() -> None:
    assert decided("f" * 20, "s" * 20).verdict is gate.Verdict.WORSE
    assert decided("f" * 20, "s" + "f" * 19).verdict is gate.Verdict.NOT_PROMOTED


@given(st.integers(0, 200), st.integers(0, 200), levels)
def test_equal_outcomes_never_promote(agreed: int, discordant: int, level: float) -> None:
    pair = apart(discordant, discordant, agreed + 1)
    assert not gate.compare("version 2 (a)", "version 1", *pair, replace(RULES, level=level)).promote


@given(st.integers(0, 100), st.integers(0, 100), levels)
def test_of_two_versions_at_most_one_is_promoted_over_the_other(won: int, lost: int, level: float) -> None:
    ours, theirs = apart(won, lost, 200)
    rules = replace(RULES, level=level)
    both = [
        gate.compare("version 2 (a)", "version 1", *side, rules).promote for side in ((ours, theirs), (theirs, ours))
    ]
    assert sum(both) <= 1
    assert both[0] == (Paired(states=200, won=won, lost=lost).p_value <= level)


@pytest.mark.parametrize(("results", "passes"), [("f" * 10, False), ("s" + "f" * 9, True), ("s" + "f" * 10, False)])
def test_a_policy_below_the_bar_never_becomes_champion(results: str, passes: bool) -> None:
    rate = Rate(results.count("s"), len(results))
    alone = gate.no_champion("version 1 (sft)", rate, RULES)
    against = gate.compare("version 2 (sft)", "version 1", *apart_from_nothing(results), replace(RULES, level=0.5))
    assert (alone.promote, against.promote) == (passes, passes)
    if not passes:
        assert alone.reason == (
            f"version 1 (sft) stays challenger: it solved {rate.successes} of {rate.episodes} states, and a champion "
            "solves at least 10 %"
        )


def apart_from_nothing(results: str) -> tuple[dict[Cell, bool], dict[Cell, bool]]:
    """Against a champion that solved nothing."""
    return cells(near=results), cells(near="f" * len(results))


def test_a_policy_that_solves_nothing_is_no_champion_even_without_a_bar() -> None:
    assert not gate.no_champion("version 1 (sft)", Rate(0, 10), replace(RULES, min_success_rate=0.0)).promote
    assert gate.no_champion("version 1 (sft)", Rate(1, 10), replace(RULES, min_success_rate=0.0)).promote


def test_a_policy_that_is_better_over_all_but_fell_on_one_task_stays_challenger_and_the_reason_says_which() -> None:
    theirs = cells(lift="f" * 10, drawer="s" * 10)
    ours = cells(lift="s" * 10, drawer="s" * 8 + "ff")
    found = gate.compare("version 4 (rloo)", "version 3", ours, theirs, RULES)
    assert not found.promote
    assert found.reason == (
        "version 4 (rloo) stays challenger, since it is lower than version 3 by 20.0 points on drawer (margin 10), "
        "although better over all tasks: of 20 states valid for both it solved 10 that version 3 failed and failed 2 "
        "that version 3 solved (exact p = 0.0193, level 0.05)"
    )
    at_the_margin = cells(lift="s" * 10, drawer="s" * 9 + "f")
    assert gate.compare("version 4 (rloo)", "version 3", at_the_margin, theirs, RULES).promote, (
        "no more than the margin"
    )
    assert gate.compare("version 4 (rloo)", "version 3", ours, theirs, replace(RULES, max_task_drop=1.0)).promote


def test_another_grid_cannot_be_told_and_no_champion_is_a_reason() -> None:
    elsewhere = gate.not_compared("version 2 (sft)", "version 1", Rate(150, 190), RULES, number="2", why="")
    assert (elsewhere.promote, elsewhere.p_value) == (False, None)
    assert "solved 150 of 190 states, but version 1 was not evaluated on this grid" in elsewhere.reason
    assert elsewhere.reason.endswith("; nightshift run --force-stage evaluate lets both play it")
    unable = gate.not_compared("version 2 (sft)", "version 1", Rate(150, 190), RULES, number="2", why="no camera")
    assert "version 1 cannot play this grid (no camera)" in unable.reason
    assert unable.reason.endswith("; nightshift promote 2 makes it champion")
    nothing = gate.not_compared("version 2 (sft)", "version 1", Rate(0, 190), RULES, number="2", why="")
    assert nothing.verdict is gate.Verdict.NOT_PROMOTED, "nobody is asked to promote what solves nothing"
    alone = gate.no_champion("version 1 (sft)", Rate(150, 190), RULES)
    assert alone.promote
    assert alone.reason == "version 1 (sft) becomes champion: there was none, and it solved 150 of 190 states"


def test_the_best_candidate_solves_most_of_the_states_valid_for_all() -> None:
    outcomes = {"sft": episodes("ssffs"), "rloo": episodes("ssisi"), "rlpd": episodes("sfsss")}
    rates = gate.common_rates(outcomes)
    assert rates == {"sft": Rate(2, 3), "rloo": Rate(3, 3), "rlpd": Rate(2, 3)}
    assert gate.best(rates) == "rloo", "rlpd solved more, but on states where rloo was not valid"


def test_of_equals_the_earlier_candidate_is_best() -> None:
    assert gate.best({"sft": Rate(7, 9), "rloo": Rate(7, 9), "rlpd": Rate(6, 9)}) == "sft"


def test_candidates_without_a_common_valid_state_cannot_be_compared() -> None:
    with pytest.raises(RolloutError, match="on no init state did all candidates have a valid episode"):
        gate.common_rates({"sft": episodes("si"), "rloo": episodes("is")})
