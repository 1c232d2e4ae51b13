"""A suite's action and observation spaces are what its simulators take and give."""

from __future__ import annotations

import numpy as np
import pytest

from nightshift.envs.base import Suite, stored_split
from nightshift.envs.fake import FAKE
from nightshift.envs.mini.suite import LIBERO_MINI
from nightshift.envs.protocols import DEFAULT

SUITES: tuple[Suite, ...] = (FAKE, LIBERO_MINI)

each_suite = pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)


@each_suite
def test_observations_of_a_step_have_the_shapes_of_the_observation_space(suite: Suite) -> None:
    env = suite.make_env(suite.tasks()[0], DEFAULT)
    env.reset("train", 0)
    observation = env.step(np.zeros(suite.action_space.size, np.float32)).observation
    space = {name: spec for name, spec in suite.observation_space().items() if name not in suite.cameras}
    assert {name: (values.shape, values.dtype.name) for name, values in observation.items()} == space


@each_suite
def test_an_env_and_a_fleet_have_the_action_space_of_their_suite(suite: Suite) -> None:
    task = suite.tasks()[0]
    assert suite.make_env(task, DEFAULT).action_space == suite.action_space
    assert suite.make_fleet(task, DEFAULT).action_space == suite.action_space


def test_camera_images_have_the_shapes_of_the_observation_space() -> None:
    env = LIBERO_MINI.make_env(LIBERO_MINI.tasks()[0])
    env.reset("train", 0)
    if env.render() is None:
        pytest.skip("no GL library works here")
    for name, image in env.camera_images(LIBERO_MINI.cameras).items():
        assert (image.shape, image.dtype.name) == LIBERO_MINI.observation_space()[name]
    env.close()


@each_suite
def test_a_validation_state_is_the_training_state_of_the_same_index(suite: Suite) -> None:
    task = suite.tasks()[0]
    assert stored_split("validation") == "train"
    assert suite.init_states(task, "validation").digest == suite.init_states(task, "train").digest
    env, fleet = suite.make_env(task, DEFAULT), suite.make_fleet(task, DEFAULT)
    env.reset("train", 5)
    expected = env.full_state()
    held_out = env.reset("validation", 5)
    np.testing.assert_array_equal(env.full_state(), expected)
    for name, values in fleet.reset("validation", [5]).items():
        np.testing.assert_array_equal(values[0], held_out[name])
    env.reset("eval", 5)
    assert not np.array_equal(env.full_state(), expected)
