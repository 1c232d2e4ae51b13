"""The compiled judgement never overrules LIBERO's predicates, and rules out nearly everything that they would."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift.envs.libero.env import LiberoEnv
from nightshift.envs.libero.suites import LIBERO_10, LIBERO_90, LIBERO_GOAL, LIBERO_SPATIAL, LiberoSuite
from nightshift.envs.mini.suite import LIBERO_MINI
from nightshift.types import Task
from tests.envs.test_suites import needs_assets

DRAWS = 300
NEAR = np.array([0.03, 0.03, 0.06])
"""Metres around a place in which objects are put, as wide as LIBERO's predicates are."""
REAL = [
    (LIBERO_SPATIAL, "on_the_stove_and_place_it_on_the_plate"),
    (LIBERO_GOAL, "turn_on_the_stove"),
    (LIBERO_GOAL, "open_the_middle_drawer"),
    (LIBERO_GOAL, "put_the_bowl_on_top_of_the_cabinet"),
    (LIBERO_90, "KITCHEN_SCENE10_close_the_top_drawer_of_the_cabinet"),
    (LIBERO_90, "KITCHEN_SCENE7_open_the_microwave"),
    (LIBERO_10, "put_the_yellow_and_white_mug_in_the_microwave_and_close_it"),
]


def judged(env: LiberoEnv) -> tuple[bool, bool]:
    """Whether the goal may hold, and whether the physics is unstable."""
    from nightshift.envs.libero.goal import judge

    possible, unstable = np.zeros((2, 1), np.bool_)
    judge(env.observation_addresses[None], np.zeros(1, np.int64), *env.goal.constants, possible, unstable)
    return bool(possible[0]), bool(unstable[0])


def disturb(env: LiberoEnv, random: np.random.Generator) -> None:
    """Put what the goal is about close to where it holds, or not quite."""
    from nightshift.envs.libero.goal import Kind, necessary

    for predicate in env._domain.parsed_problem["goal_state"]:
        condition = necessary(env._domain, predicate)
        assert condition is not None, predicate
        if condition.kind == Kind.JOINT_BETWEEN:
            limit = random.choice([bound for bound in condition.bounds[:2] if np.isfinite(bound)])
            env._data.qpos[condition.item] = limit + random.choice([0.0, random.normal(scale=0.01)])
            continue
        places = env._data.xpos if condition.kind == Kind.OVER_BODY else env._data.site_xpos
        centre = places[condition.place].copy()
        if condition.kind == Kind.UP:
            centre = np.array([*env._data.xpos[condition.item][:2], 1.0])
        joint = env._model.body_jntadr[condition.item]
        address = env._model.jnt_qposadr[joint]
        env._data.qpos[address : address + 3] = centre + random.normal(scale=NEAR)
    mujoco.mj_forward(env._model, env._data)


def assert_agrees(suite: LiberoSuite, task: Task) -> None:
    env, random = suite.make_env(task), np.random.default_rng(0)
    solved, ruled_out = 0, 0
    for draw in range(DRAWS):
        if draw % 50 == 0:
            env.reset("eval", 0)
        disturb(env, random)
        possible, _ = judged(env)
        holds = env.is_solved()
        assert possible or not holds, f"draw {draw}: LIBERO says solved"
        solved, ruled_out = solved + holds, ruled_out + (not possible)
    assert solved > DRAWS / 100, "the draws reach the goal"
    assert ruled_out > DRAWS / 10, "the draws miss the goal, and that is seen"


@pytest.mark.parametrize("task", LIBERO_MINI.tasks(), ids=lambda task: task.name)
def test_what_libero_calls_solved_is_never_ruled_out_on_libero_mini(task: Task) -> None:
    assert_agrees(LIBERO_MINI, task)


@needs_assets
@pytest.mark.parametrize(("suite", "name"), REAL, ids=lambda value: str(getattr(value, "name", value)))
def test_what_libero_calls_solved_is_never_ruled_out_on_liberos_suites(suite: LiberoSuite, name: str) -> None:
    assert_agrees(suite, next(task for task in suite.tasks() if name in task.name))


def test_the_three_warnings_of_broken_physics_and_no_others_make_a_simulation_unstable() -> None:
    env = LIBERO_MINI.make_env(LIBERO_MINI.tasks()[0])
    unstable = set()
    for kind in range(int(mujoco.mjtWarning.mjNWARNING)):
        env.reset("train", 0)
        env._data.warning[kind].number = 1
        _, seen = judged(env)
        assert seen == env.is_unstable()
        if seen:
            unstable.add(mujoco.mjtWarning(kind).name)
    assert unstable == {"mjWARN_BADQPOS", "mjWARN_BADQVEL", "mjWARN_BADQACC"}


numbers = st.floats(-3, 3).map(lambda x: round(x, 6))  # there is none between two neighbouring ones to ask about
limits = st.lists(numbers, min_size=1, max_size=4)


@given(limits, st.integers(0, 3), st.sampled_from(["below", "above", "inside"]), st.floats(-4, 4))
def test_the_range_of_a_joint_contains_every_position_where_liberos_test_holds(
    ends: list[float], index: int, shape: str, position: float
) -> None:
    from nightshift.envs.libero.articulation import range_where

    limit = ends[index % len(ends)]
    tests = {
        "below": lambda x: x < limit,
        "above": lambda x: x >= limit,
        "inside": lambda x: min(ends) <= x <= max(ends),
    }
    low, high = range_where(tests[shape], ends)
    for x in (position, limit, np.nextafter(limit, 9), np.nextafter(limit, -9)):
        assert not tests[shape](x) or low <= x <= high
    expected = {"below": (-np.inf, limit), "above": (limit, np.inf), "inside": (min(ends), max(ends))}
    assert (low, high) == expected[shape], "and no others"
