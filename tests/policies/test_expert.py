"""The scripted expert: solves every task of libero_mini, libero_object and libero_spatial, and has no memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nightshift import envs
from nightshift.envs.base import Env
from nightshift.envs.libero.suites import AS_LIBERO_DRAWS, LIBERO_OBJECT, LIBERO_SPATIAL
from nightshift.envs.mini.suite import LIBERO_MINI
from nightshift.envs.protocols import DEFAULT
from nightshift.policies.expert import Expert, goals
from nightshift.policies.expert.geometry import shape_of
from nightshift.policies.expert.grasp import is_held
from nightshift.types import Body, Joint, Scene, Split, Task
from tests.envs.test_suites import needs_assets

TASKS = LIBERO_MINI.tasks()
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: str(task.name))
HORIZON = 100
REAL_TASKS = [task for suite in (LIBERO_OBJECT, LIBERO_SPATIAL) for task in suite.tasks()]
DOWN = np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, -1.0]])


def solves(env: Env, split: Split, init_state: int) -> bool:
    env.reset(split, init_state)
    horizon = DEFAULT.max_steps.get(env.task.suite, HORIZON)
    return any(env.step(Expert().act(env.scene())).success for _ in range(horizon))


def cube_scene(gripper: list[float], opening: float = 0.08) -> Scene:
    cube = Body(position=np.array([0.0, 0.0, 0.92]), rotation=np.eye(3), half_size=np.full(3, 0.02))
    return Scene(
        gripper_position=np.array(gripper),
        gripper_rotation=DOWN,
        gripper_opening=opening,
        bodies={"cube_1": cube},
        joints={},
        goal=(("up", "cube_1"),),
    )


@each_task
def test_expert_solves_a_few_init_states_of_each_split(task: Task) -> None:
    env = LIBERO_MINI.make_env(task)
    splits: tuple[Split, ...] = ("train", "eval")
    assert all(solves(env, split, init_state) for split in splits for init_state in (0, 49))


@pytest.mark.slow
@each_task
def test_expert_solves_95_percent_of_all_init_states(task: Task) -> None:
    env = LIBERO_MINI.make_env(task)
    splits: tuple[Split, ...] = ("train", "eval")
    for split in splits:
        count = envs.init_state_count(env.task, split)
        solved = sum(solves(env, split, init_state) for init_state in range(count))
        assert solved >= 0.95 * count, f"{split}: {solved} of {count}"


@needs_assets
@pytest.mark.parametrize("name", ["milk_and_place", "black_bowl_in_the_top_drawer"], ids=["a carton", "a bowl's rim"])
def test_expert_solves_tasks_of_liberos_own(name: str) -> None:
    task = next(task for task in REAL_TASKS if name in task.name)
    assert solves(envs.suite(task.suite).make_env(task, DEFAULT, AS_LIBERO_DRAWS), "eval", 0)


@needs_assets
@pytest.mark.slow
@pytest.mark.parametrize("task", REAL_TASKS, ids=lambda task: str(task.name))
def test_expert_solves_nine_of_ten_init_states_of_liberos_own_tasks(task: Task) -> None:
    env = envs.suite(task.suite).make_env(task, DEFAULT, AS_LIBERO_DRAWS)
    unsolved = [init_state for init_state in range(0, 50, 5) if not solves(env, "eval", init_state)]
    assert len(unsolved) <= 1, f"not solved: {unsolved}"


def test_far_from_the_object_it_moves_there_with_an_open_gripper() -> None:
    action = Expert().act(cube_scene([-0.2, 0.1, 1.1]))
    assert action[0] == 1.0
    assert action[1] < 0 > action[2]
    assert action[6] == -1.0


def test_around_the_object_it_closes_the_gripper() -> None:
    assert Expert().act(cube_scene([0.0, 0.0, 0.92]))[6] == 1.0


def test_with_the_object_in_hand_it_lifts() -> None:
    action = Expert().act(cube_scene([0.0, 0.0, 0.92], opening=0.04))
    assert action[2] == 1.0
    assert action[6] == 1.0


def test_the_same_scene_gives_the_same_action_whatever_came_before() -> None:
    expert = Expert()
    scene = cube_scene([-0.05, 0.02, 0.97])
    first = expert.act(scene)
    expert.act(cube_scene([0.0, 0.0, 0.92], opening=0.04))
    np.testing.assert_array_equal(expert.act(scene), first)


def test_actions_stay_in_range_from_anywhere() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        scene = cube_scene(list(rng.uniform(-2, 2, 3)), opening=float(rng.uniform(0, 0.08)))
        action = Expert().act(scene)
        assert action.shape == (7,)
        assert action.dtype == np.float32
        assert np.abs(action).max() <= 1.0


def test_a_joint_that_the_scene_does_not_have_is_refused_by_name() -> None:
    scene = replace(cube_scene([0.0, 0.0, 1.0]), goal=(("open", "cube_1"),))
    with pytest.raises(ValueError, match="cannot do 'open cube_1'"):
        Expert().act(scene)


def test_a_goal_it_has_no_skill_for_is_refused_by_name() -> None:
    scene = replace(cube_scene([0.0, 0.0, 1.0]), goal=(("turnon", "cube_1"),))
    with pytest.raises(ValueError, match="cannot do 'turnon cube_1'"):
        Expert().act(scene)


def test_of_several_goals_it_works_on_the_first_that_does_not_hold_yet() -> None:
    scene = cube_scene([0.0, 0.0, 1.1])
    plate = Body(position=np.array([0.0, 0.0, 0.89]), rotation=np.eye(3), half_size=np.array([0.1, 0.1, 0.01]))
    away = Body(position=np.array([0.3, 0.0, 0.92]), rotation=np.eye(3), half_size=np.full(3, 0.02))
    bodies = {**scene.bodies, "plate_1": plate, "cube_2": away}
    scene = replace(scene, bodies=bodies, goal=(("on", "cube_1", "plate_1"), ("up", "cube_2")))
    assert Expert().act(scene)[0] == 1.0
    gone = replace(bodies["cube_1"], position=np.array([-0.3, 0.0, 0.92]))
    assert Expert().act(replace(scene, bodies={**bodies, "cube_1": gone}))[0] == -1.0


def test_an_object_goes_to_its_place_before_another_is_put_on_it() -> None:
    stacked, below = ("on", "cube_1", "cube_2"), ("in", "cube_2", "tray_1")
    for goal in ((stacked, below), (below, stacked)):
        assert goals.in_order(replace(cube_scene([0.0, 0.0, 1.0]), goal=goal)) == [below, stacked]


def test_open_fingers_around_something_do_not_count_as_holding_it() -> None:
    """A wide block's corner may fill the open hand while it is being pushed."""
    scene = cube_scene([0.0, 0.0, 0.92])
    block = replace(scene.bodies["cube_1"], half_size=np.full(3, 0.0395))
    assert not is_held(replace(scene, bodies={"cube_1": block}), "cube_1")
    assert is_held(replace(scene, gripper_opening=0.04), "cube_1")
    assert not is_held(replace(scene, gripper_opening=0.05), "cube_1")


def block_at(*position: float, half_size: float = 0.02) -> Body:
    block = Body(position=np.array(position), rotation=np.eye(3), half_size=np.full(3, half_size))
    return replace(block, boxes=shape_of(block))


def test_what_is_in_the_air_between_the_fingers_is_held_even_where_it_is_thinner_than_they_are_apart() -> None:
    """A pot that hangs on its knob tilts: what is between the fingers then is thinner than they are apart."""
    scene = cube_scene([0.0, 0.0, 1.02], opening=0.05)
    lifted, beside = block_at(0.0, 0.0, 1.02), block_at(0.2, 0.0, 0.92)
    in_the_air = replace(scene, bodies={"cube_1": lifted, "pot_1": beside})
    assert is_held(in_the_air, "cube_1")
    assert not is_held(replace(in_the_air, gripper_opening=0.08), "cube_1"), "it is let go"
    assert not is_held(replace(in_the_air, gripper_position=np.array([0.1, 0.0, 1.02])), "cube_1")
    overhang = block_at(0.0, 0.0, 1.2)
    assert is_held(replace(in_the_air, bodies={**in_the_air.bodies, "shelf_1": overhang}), "cube_1")


def test_what_stands_on_the_table_is_not_held_while_the_fingers_close() -> None:
    scene = replace(cube_scene([0.0, 0.0, 0.92], opening=0.05), robot_position=np.array([-0.6, 0.0, 0.91]))
    standing, beside = block_at(0.0, 0.0, 0.92), block_at(0.2, 0.0, 0.92)
    assert not is_held(replace(scene, bodies={"cube_1": standing, "pot_1": beside}), "cube_1")
    fallen = block_at(0.5, 0.0, 0.02)
    assert not is_held(replace(scene, bodies={"cube_1": standing, "pot_1": fallen}), "cube_1")
    stove = block_at(0.2, 0.0, 0.92, half_size=0.05)
    knob = Joint(
        kind="hinge",
        position=0.0,
        limits=(0.0, 1.0),
        axis=np.array([0.0, 0.0, 1.0]),
        anchor=np.zeros(3),
        link=shape_of(stove),
        holds={},
    )
    with_stove = replace(scene, bodies={"cube_1": standing, "stove_1": stove}, joints={"stove_1": knob})
    assert not is_held(with_stove, "cube_1"), "the stove reaches below the table"


def test_closed_fingers_with_nothing_between_them_do_not_hold_an_object() -> None:
    assert not is_held(cube_scene([0.1, 0.0, 0.92], opening=0.001), "cube_1")


def test_fingers_that_press_on_top_of_something_do_not_hold_it() -> None:
    """A cube of 4 cm under closed fingers, whose tips are in it by as much as contacts give way."""
    scene = cube_scene([0.0, 0.0, 0.9425], opening=0.012)
    assert not is_held(scene, "cube_1")
    action = Expert().act(scene)
    assert action[6] == -1.0, "it opens, instead of lifting nothing"
    lower = cube_scene([0.0, 0.0, 0.935], opening=0.037)
    assert is_held(lower, "cube_1")


def test_fingers_that_have_closed_above_something_open_and_rise_before_they_try_again() -> None:
    """A knob of 16 mm from which they slipped off: as near as where they would close."""
    scene = cube_scene([0.0, 0.0, 0.937], opening=0.004)
    knob = replace(scene.bodies["cube_1"], half_size=np.array([0.008, 0.008, 0.01]))
    action = Expert().act(replace(scene, bodies={"cube_1": knob}))
    assert action[2] > 0.0 and action[6] == -1.0
