"""LIBERO's five suites: every task builds, resets to its init states and steps. They need LIBERO's meshes."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import mujoco
import numpy as np
import pytest
from numpy.typing import NDArray

from nightshift.envs.libero.articulation import articulations
from nightshift.envs.libero.suites import BENCHMARK_SUITES, LIBERO_GOAL, BenchmarkSuite
from nightshift.envs.protocols import PROTOCOLS, Protocol
from nightshift.errors import SimulatorError
from nightshift.types import Task

FORWARD = np.array([0.5, 0, -0.2, 0, 0, 0.1, 1], dtype=np.float32)


def why_no_assets() -> str:
    try:
        LIBERO_GOAL.assets()
    except SimulatorError as error:
        return f"LIBERO's assets are absent: {error.what}"
    return ""


each_suite = pytest.mark.parametrize(
    "suite",
    [pytest.param(suite, marks=[pytest.mark.slow] * (suite is not LIBERO_GOAL)) for suite in BENCHMARK_SUITES],
    ids=lambda suite: suite.name,
)
needs_assets = pytest.mark.skipif(bool(why_no_assets()), reason=why_no_assets() or "they are there")


def check(suite: BenchmarkSuite, task: Task, init_states: Iterable[int]) -> None:
    """Build it, reset it to each of the states, step it; free it before the next is built."""
    env = suite.make_env(task)
    assert suite.init_states(task, "eval").count == 50
    for init_state in init_states:
        before = env.reset("eval", init_state)
        after, success = env.step(FORWARD)
        assert not success, "an init state is not solved"
        assert all(np.isfinite(values).all() for name, values in after.items() if name != "instruction")
        assert np.abs(after["proprio"] - before["proprio"]).max() > 1e-4, "the arm moves"
        assert after["task"].shape == (task.suite_size,)
    env.close()
    del env
    gc.collect()


@needs_assets
@each_suite
def test_the_first_and_last_task_of_a_suite_build_reset_and_step(suite: BenchmarkSuite) -> None:
    tasks = suite.tasks()
    check(suite, tasks[0], (0, 49))
    check(suite, tasks[-1], (17,))


@needs_assets
@pytest.mark.slow
@pytest.mark.parametrize(
    ("suite", "index"),
    [(suite, index) for suite in BENCHMARK_SUITES for index in range(len(suite.tasks()))],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_every_task_of_every_suite_resets_to_each_of_its_init_states_and_steps(
    suite: BenchmarkSuite, index: int
) -> None:
    check(suite, suite.tasks()[index], range(50))


@needs_assets
@pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=PROTOCOLS)
def test_a_reset_lets_the_world_settle_as_long_as_the_protocol_says(protocol: Protocol) -> None:
    env = LIBERO_GOAL.make_env(LIBERO_GOAL.tasks()[0], protocol)
    env.reset("eval", 0)
    start = LIBERO_GOAL.load_init_states(env.task, "eval")[0][0]
    assert env.full_state()[0] - start == pytest.approx(protocol.settle_steps / 20)


@needs_assets
@each_suite
def test_a_real_suite_replays_bit_identically(suite: BenchmarkSuite) -> None:
    env = suite.make_env(suite.tasks()[1])
    rng = np.random.default_rng(8)
    actions = rng.uniform(-1, 1, (4, suite.action_space.size)).astype(np.float32)

    def play() -> list[NDArray[Any]]:
        env.reset("eval", 1)
        return [env.step(action).observation["objects"] for action in actions] + [env.full_state()]

    first = play()
    env.reset("eval", 0)
    env.step(actions[0])
    for before, after in zip(first, play(), strict=True):
        np.testing.assert_array_equal(before, after)


@needs_assets
def test_a_stove_that_is_on_shines_in_pictures() -> None:
    """LIBERO updates the light after every step; we do when an image is rendered."""
    env = LIBERO_GOAL.make_env(next(task for task in LIBERO_GOAL.tasks() if task.name == "turn_on_the_stove"))
    env.reset("eval", 0)
    if env.render() is None:
        pytest.skip("no GL library works here")
    (site, _), *_ = env._domain.get_object("flat_stove_1").object_properties["vis_site_names"].values()
    assert env._model.site(site).rgba[3] <= 0
    env._data.qpos[articulations(env._domain, env._model)["flat_stove_1"].address] = 1.0
    mujoco.mj_forward(env._model, env._data)
    env.render()
    assert env._model.site(site).rgba[3] > 0
    env.close()
