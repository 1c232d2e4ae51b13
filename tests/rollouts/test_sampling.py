from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift import config
from nightshift.envs import fake
from nightshift.rollouts.sampling import Group, Round, Sampler
from nightshift.rollouts.schedule import Ring
from nightshift.types import RolloutRequest, Trajectory
from tests.conftest import section

TASKS = {task: range(200) for task in fake.TASKS}
NEAR = fake.TASKS[0]


def settings(*, groups: int = 4, **sampling: Any) -> config.Rloo:
    values = section("rloo")
    values |= {"groups": groups, "group_size": 4}
    values["sampling"] |= sampling
    return config.Rloo.model_validate(values)


def group(request: RolloutRequest, solved: int, *, valid: bool = True) -> Group:
    nothing = np.zeros((1, 7), np.float32)
    return [
        Trajectory(
            request=request,
            member=member,
            observations={"proprio": nothing},
            final={},
            actions=nothing,
            executed=nothing,
            log_probs=nothing,
            latents={"denoising_chain": nothing},
            chunk=1,
            success=member < solved,
            valid=valid,
        )
        for member in range(request.count)
    ]


def searched(sampler: Sampler, *solved: int) -> Round:
    """A round whose groups solve as many of their episodes as told, over and over."""
    outcomes = Ring(list(solved))
    found = sampler.begin()
    while requests := found.wave():
        found.take([group(request, outcomes.take(1)[0]) for request in requests])
    return found


def asked(found: Round) -> list[tuple[str, int]]:
    return [(g[0].request.task, g[0].request.init_state) for g in found.played]


def test_ten_states_four_at_a_time_wrap_around() -> None:
    ring = Ring(range(10))
    assert [ring.take(4) for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]


@given(st.integers(1, 12), st.lists(st.integers(0, 9), max_size=12))
def test_a_ring_leaves_none_out_and_prefers_none(size: int, takes: list[int]) -> None:
    ring = Ring(range(size))
    taken = Counter(item for count in takes for item in ring.take(count))
    counts = [taken[item] for item in range(size)]
    assert max(counts) - min(counts) <= 1


def test_a_group_shares_one_state_and_groups_of_a_task_have_different_ones() -> None:
    found = searched(Sampler(TASKS, settings(groups=8), seed=0), 2)
    assert [task for task, _ in asked(found)] == ["near", "far"] * 4
    near = [state for task, state in asked(found) if task == "near"]
    assert len(set(near)) == 4
    assert all(len({episode.request for episode in g}) == 1 for g in found.played)
    assert {g[0].request.split for g in found.played} == {"train"}


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=9),
    st.integers(1, 5),
    st.floats(1, 3),
    st.sampled_from([(0.0, 0.75), (0.25, 0.75), (0.5, 0.5)]),
)
def test_a_round_accepts_exactly_what_was_asked_for_or_all_there_is(
    outcomes: list[int], waves: int, oversample: float, bounds: tuple[float, float]
) -> None:
    low, high = bounds
    chosen = settings(groups=5, waves=waves, oversample=oversample, min_success_rate=low, max_success_rate=high)
    found = searched(Sampler(TASKS, chosen, seed=0), *outcomes)
    kept = [g for g in found.played if low <= sum(e.success for e in g) / 4 <= high]
    assert found.accepted == kept[:5]
    assert found.surplus == kept[5:]
    assert found.missing == max(5 - len(kept), 0)
    assert len(found.played) <= waves * int(np.ceil(5 * oversample))


def test_of_groups_that_are_not_learned_from_only_the_outcomes_stay_in_memory() -> None:
    chosen = settings(groups=2, waves=3, oversample=2.0, min_success_rate=0.1, max_success_rate=0.9)
    found = searched(Sampler(TASKS, chosen, seed=0), 0, 2, 4, 1, 3)
    assert [sum(episode.success for episode in g) for g in found.played] == [0, 2, 4, 1]
    unsolved, first, solved, second = found.played
    assert found.accepted[0] is first and found.accepted[1] is second
    assert all(episode.observations and episode.latents for episode in first + second)
    assert not any(episode.observations or episode.latents or episode.final for episode in unsolved + solved)
    assert all(array.base is None for e in unsolved + solved for array in (e.actions, e.executed, e.log_probs)), (
        "a view holds the object of the worker that played it"
    )


@pytest.mark.parametrize("solved", [0, 4])
def test_when_everything_is_solved_or_nothing_the_search_ends(solved: int) -> None:
    found = searched(Sampler(TASKS, settings(waves=3, min_success_rate=0.1, max_success_rate=0.9), seed=0), solved)
    assert not found.accepted
    assert len(found.played) == 12


def test_bounds_of_the_filter_are_inclusive() -> None:
    found = searched(Sampler(TASKS, settings(groups=3, min_success_rate=0.25, max_success_rate=0.75), seed=0), 1, 3, 4)
    assert [sum(e.success for e in g) for g in found.accepted] == [1, 3]


def test_a_group_that_the_simulator_spoilt_is_replaced_and_not_judged() -> None:
    sampler = Sampler(TASKS, settings(groups=2, waves=2), seed=0)
    found = sampler.begin()
    first, second = found.wave()
    found.take([group(first, 0, valid=False), group(second, 2)])
    (third,) = found.wave()
    found.take([group(third, 2)])
    assert not found.missing
    assert len(found.played) == 3


def test_a_solved_state_is_passed_over_and_looked_at_again_after_a_while() -> None:
    sampler = Sampler({NEAR: range(200)}, settings(groups=200, skip_solved=2), seed=0)
    every_state = [state for _, state in asked(searched(sampler, 4))]
    assert sorted(every_state) == list(range(200))
    seen = [sampler.request(NEAR.name).init_state for _ in range(200)]
    assert sampler.state["states"][NEAR.name] == 200 + 3 * 200
    assert seen == every_state


def test_a_curriculum_gives_more_to_the_task_that_can_still_teach() -> None:
    sampler = Sampler(TASKS, settings(groups=20, curriculum_floor=0.1), seed=0)
    for _ in range(10):
        found = sampler.begin()
        while requests := found.wave():
            found.take([group(request, 4 if request.task == "near" else 2) for request in requests])
    counts = Counter(task for task, _ in asked(found))
    assert counts["far"] > 3 * counts["near"] > 0


def test_iterations_take_tasks_in_turn_when_one_plays_fewer_than_all() -> None:
    sampler = Sampler(TASKS, settings(groups=2, tasks_at_once=1), seed=0)
    assert [{task for task, _ in asked(searched(sampler, 2))} for _ in range(3)] == [{"near"}, {"far"}, {"near"}]


def test_groups_start_from_the_given_states_alone() -> None:
    sampler = Sampler({task: range(3, 8) for task in fake.TASKS}, settings(groups=40), seed=0)
    assert {state for _, state in asked(searched(sampler, 2))} == set(range(3, 8))


@pytest.mark.parametrize("floor", [0.25, 0.5])
def test_a_curriculum_notices_within_one_iteration_that_a_solved_task_is_forgotten(floor: float) -> None:
    sampler = Sampler(TASKS, settings(groups=32, curriculum_floor=floor), seed=0)

    def play(near: int) -> Counter[str]:
        found = sampler.begin()
        while requests := found.wave():
            found.take([group(request, near if request.task == "near" else 2) for request in requests])
        return Counter(task for task, _ in asked(found))

    for _ in range(10):
        solved = play(near=4)
    forgotten = play(near=2)
    after = play(near=2)
    assert solved["near"] >= floor / (1 + floor) * 32 - 1
    assert forgotten["near"] >= solved["near"]
    assert after["near"] > 0.85 * after["far"]


def test_ranks_get_runs_of_the_groups_as_even_as_can_be() -> None:
    found = searched(Sampler(TASKS, settings(groups=5), seed=0), 2)
    parts = found.by_rank(3)
    assert [g for part in parts for g in part] == found.accepted
    assert [len(part) for part in parts] == [2, 1, 2]
    assert [len(part) for part in found.by_rank(7)].count(0) == 2


@pytest.mark.parametrize("groups", [1, 3])
def test_tasks_take_turns_from_iteration_to_iteration(groups: int) -> None:
    sampler = Sampler(TASKS, settings(groups=groups), seed=0)
    counts = Counter(task for _ in range(10) for task, _ in asked(searched(sampler, 2)))
    assert counts["near"] == counts["far"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"min_success_rate": 0.9, "max_success_rate": 0.1}, "no group could be accepted"),
        ({"oversample": 2.0}, "wastes episodes"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        settings(**changes)


def test_every_knob_of_sampling_is_alive() -> None:
    """What is asked for, or learned from, over a few iterations differs from the defaults'."""

    def course(**changes: Any) -> list[Any]:
        chosen = settings(**{"groups": 6, "min_success_rate": 0.1, "waves": 2, **changes})
        sampler = Sampler(TASKS, chosen, seed=0)
        rounds = [searched(sampler, 4, 0, 1, 4, 2) for _ in range(80)]
        return [([g[0].request for g in found.played], len(found.accepted)) for found in rounds]

    changes: dict[str, Any] = {
        "tasks_at_once": 1,
        "min_success_rate": 0.4,
        "max_success_rate": 0.6,
        "waves": 3,
        "oversample": 1.5,
        "skip_solved": 2,
        "curriculum_floor": 1.0,
    }
    assert [knob for knob, value in changes.items() if course(**{knob: value}) == course()] == []
    assert set(config.Sampling.model_fields) - set(changes) == {"staleness", "when_short"}  # tests/stages/test_rloo.py


def test_exploration_narrows_linearly_from_the_first_iteration_to_the_last() -> None:
    chosen = settings(groups=2).model_copy(update={"iterations": 5, "temperature": 0.5, "temperature_end": 0.1})
    sampler = Sampler(TASKS, chosen, seed=0)
    played = [{g[0].request.temperature for g in searched(sampler, 2).played} for _ in range(5)]
    assert all(len(temperatures) == 1 for temperatures in played)
    assert [temperature for (temperature,) in played] == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1])


def test_a_restored_sampler_asks_for_the_same_groups() -> None:
    chosen = settings(groups=6, skip_solved=3, curriculum_floor=0.1, waves=2, min_success_rate=0.1)
    sampler = Sampler(TASKS, chosen, seed=1)
    for _ in range(5):
        searched(sampler, 0, 4, 2)
    saved = json.loads(json.dumps(sampler.state))
    expected = [g[0].request for _ in range(4) for g in searched(sampler, 1, 4).played]
    again = Sampler(TASKS, chosen, seed=1)
    again.restore(saved)
    assert [g[0].request for _ in range(4) for g in searched(again, 1, 4).played] == expected
