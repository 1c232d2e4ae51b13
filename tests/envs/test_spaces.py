"""A suite's action and observation spaces are what its simulators take and give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nightshift import config, envs
from nightshift.envs.base import TEXT, Suite, stored_split
from nightshift.envs.fake import FAKE
from nightshift.envs.mini.suite import LIBERO_MINI
from nightshift.envs.protocols import DEFAULT

SUITES: tuple[Suite, ...] = (FAKE, LIBERO_MINI)
IMAGE = 32
CAMERAS = config.Cameras(names=("agentview",), size=IMAGE, shadows=False)

each_suite = pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)


def dtype_name(values: NDArray[Any]) -> str:
    return "str" if values.dtype.kind == "U" else values.dtype.name


@each_suite
def test_observations_of_a_step_have_the_shapes_of_the_observation_space(suite: Suite) -> None:
    env = suite.make_env(suite.tasks()[0], DEFAULT, CAMERAS)
    env.reset("train", 0)
    observation = env.step(np.zeros(suite.action_space.size, np.float32)).observation
    assert {name: (values.shape, dtype_name(values)) for name, values in observation.items()} == (
        suite.observation_space({})
    )


@each_suite
def test_the_instruction_is_an_observation(suite: Suite) -> None:
    task = suite.tasks()[1]
    fleet = suite.make_fleet(task, DEFAULT, CAMERAS)
    assert suite.observation_space({})["instruction"] == TEXT
    assert fleet.reset("train", [0, 1])["instruction"].tolist() == [task.language, task.language]
    steps = fleet.step(np.zeros((2, suite.action_space.size), np.float32), np.ones(2, np.bool_))
    assert steps.observation["instruction"].tolist() == [task.language, task.language]


@each_suite
def test_an_env_and_a_fleet_have_the_action_space_of_their_suite(suite: Suite) -> None:
    task = suite.tasks()[0]
    assert suite.make_env(task, DEFAULT, CAMERAS).action_space == suite.action_space
    assert suite.make_fleet(task, DEFAULT, CAMERAS).action_space == suite.action_space


@each_suite
def test_camera_images_have_the_shapes_of_the_observation_space(suite: Suite) -> None:
    sizes = {camera: IMAGE * (1 + number) for number, camera in enumerate(suite.cameras)}
    drawn = config.Cameras.model_validate({"names": suite.cameras, "size": sizes, "shadows": False})
    env = suite.make_env(suite.tasks()[0], DEFAULT, drawn)
    env.reset("train", 0)
    if env.render() is None:
        pytest.skip("no GL library works here")
    for name, image in env.camera_images(suite.cameras).items():
        assert (image.shape, image.dtype.name) == suite.observation_space(sizes)[name]
    env.close()


def test_a_policy_gets_the_cameras_that_are_drawn_and_every_other_observation() -> None:
    chosen = config.Env(suite="libero_mini", tasks=(), protocol=DEFAULT.name, horizon=9, cameras=CAMERAS)
    space = envs.observation_space(chosen)
    assert set(space) == {"proprio", "state", "objects", "egocentric", "task", "instruction", "agentview"}
    assert space["agentview"] == ((IMAGE, IMAGE, 3), "uint8")


@each_suite
def test_a_validation_state_is_the_training_state_of_the_same_index(suite: Suite) -> None:
    task = suite.tasks()[0]
    assert stored_split("validation") == "train"
    assert suite.init_states(task, "validation").digest == suite.init_states(task, "train").digest
    env, fleet = suite.make_env(task, DEFAULT, CAMERAS), suite.make_fleet(task, DEFAULT, CAMERAS)
    env.reset("train", 5)
    expected = env.full_state()
    held_out = env.reset("validation", 5)
    np.testing.assert_array_equal(env.full_state(), expected)
    for name, values in fleet.reset("validation", [5]).items():
        np.testing.assert_array_equal(values[0], held_out[name])
    env.reset("eval", 5)
    assert not np.array_equal(env.full_state(), expected)
