"""libero_mini: its frozen init states and its six tasks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nightshift.envs.mini.suite import LIBERO_MINI
from nightshift.errors import SimulatorError
from nightshift.types import Task

TASKS = LIBERO_MINI.tasks()
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: str(task.name))
TABLE = 0.9


def test_there_are_six_tasks_in_a_fixed_order() -> None:
    assert [task.name for task in TASKS] == [
        "lift_cube",
        "push_block_to_zone",
        "place_cube_on_plate",
        "place_can_in_tray",
        "stack_red_on_blue",
        "open_drawer",
    ]
    assert [task.index for task in TASKS] == list(range(6))
    assert {task.suite_size for task in TASKS} == {6}


@each_task
def test_the_instruction_is_the_one_in_the_bddl_file(task: Task) -> None:
    assert f"(:language {task.language})" in LIBERO_MINI.bddl_file(task.name).read_text()


@each_task
def test_train_and_eval_init_states_are_disjoint(task: Task) -> None:
    train = {state.tobytes() for state in LIBERO_MINI.load_init_states(task, "train")}
    held_out = {state.tobytes() for state in LIBERO_MINI.load_init_states(task, "eval")}
    assert (len(train), len(held_out)) == (200, 50 + 200)
    assert not train & held_out


@each_task
def test_init_states_are_settled_and_unsolved(task: Task) -> None:
    env = LIBERO_MINI.make_env(task)
    rest = np.zeros(LIBERO_MINI.action_space.size, np.float32)
    for init_state in (0, 17, 49):
        before = env.reset("eval", init_state)["objects"].copy()
        for _ in range(5):
            observation, success = env.step(rest)
            assert not success
        assert np.abs(observation["objects"][:3] - before[:3]).max() < 2e-3
        assert before[2] > TABLE


@each_task
def test_objects_stand_upright_on_the_table(task: Task) -> None:
    env = LIBERO_MINI.make_env(task)
    for init_state in range(0, 50, 7):
        env.reset("eval", init_state)
        bodies = env.scene().bodies
        for name in env._domain.objects_dict:
            assert bodies[name].rotation[2, 2] > 0.9999
            assert bodies[name].position[2] - bodies[name].half_size[2] == pytest.approx(TABLE, abs=1e-3)


@each_task
def test_init_states_spread_the_first_object_over_eight_centimetres(task: Task) -> None:
    env = LIBERO_MINI.make_env(task)
    positions = np.array([env.reset("eval", index)["objects"][:3] for index in range(50)])
    assert (np.ptp(positions, axis=0)[:2] > 0.08).all()


def test_sampling_with_the_same_seed_gives_the_same_state() -> None:
    env = LIBERO_MINI.make_env(TASKS[0])
    first, other = env.sample_state(11), env.sample_state(12)
    assert first is not None and other is not None
    env.reset("train", 3)
    np.testing.assert_array_equal(first, env.sample_state(11))
    assert not np.array_equal(first, other)


def test_init_states_take_little_space() -> None:
    assert sum(LIBERO_MINI.init_states_file(task.name).stat().st_size for task in TASKS) < 2_000_000


def test_damaged_init_states_are_refused_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.npz"
    broken.write_bytes(LIBERO_MINI.init_states_file("lift_cube").read_bytes()[:500])
    monkeypatch.setattr(LIBERO_MINI, "init_states_file", lambda task: broken)
    with pytest.raises(SimulatorError, match="scripts/make_init_states"):
        LIBERO_MINI.make_env(TASKS[0]).reset("train", 0)


def test_drawer_position_is_observed_and_in_the_scene() -> None:
    env = LIBERO_MINI.make_env(TASKS[5])
    observation = env.reset("eval", 0)
    assert env.scene().joints["cabinet_1_drawer_region"].position == pytest.approx(float(observation["objects"][-1]))
