"""Many simulations in one process: each plays as if it were alone, and LIBERO itself judges it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from nightshift.envs.libero.fleet import LiberoFleet
from nightshift.envs.mini.suite import LIBERO_MINI
from nightshift.errors import SimulatorError
from nightshift.policies.expert import Expert
from nightshift.types import Array, Task

TRAY = 3
STEPS = 12
FACING_DOWN = np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, -1.0]])
EVERY = np.ones(3, np.bool_)
ACTION_DIM = LIBERO_MINI.action_space.size


@pytest.fixture(scope="module")
def fleet() -> Iterator[LiberoFleet]:
    made = LIBERO_MINI.make_fleet(LIBERO_MINI.tasks()[TRAY])
    yield made
    made.close()


def random_actions(seed: int, lanes: int) -> Array:
    return np.random.default_rng(seed).uniform(-1, 1, (STEPS, lanes, ACTION_DIM)).astype(np.float32)


def play(fleet: LiberoFleet, states: list[int], actions: Array, active: np.ndarray | None = None) -> dict[str, Array]:
    """What is shown after every step: each [steps, lanes, D]."""
    active = np.ones(len(states), np.bool_) if active is None else active
    fleet.reset("train", states)
    shown = [fleet.step(row, active).observation for row in actions]
    assert all(one is shown[0] for one in shown), "the arrays are the same ones every step"
    fleet.reset("train", states)
    seen: dict[str, list[Array]] = {name: [] for name in shown[0]}
    for row in actions:
        for name, values in fleet.step(row, active).observation.items():
            seen[name].append(values.copy())
    return {name: np.stack(values) for name, values in seen.items()}


def assert_equal(one: dict[str, Array], other: dict[str, Array]) -> None:
    for name, values in one.items():
        np.testing.assert_array_equal(values, other[name], err_msg=name)


def test_a_simulation_in_a_fleet_plays_what_it_plays_alone_bit_for_bit(fleet: LiberoFleet) -> None:
    actions = random_actions(0, 3)
    together = play(fleet, [4, 9, 4], actions)
    alone = LIBERO_MINI.make_env(fleet.task)
    for lane, state in enumerate((4, 9, 4)):
        alone.reset("train", state)
        for step, action in enumerate(actions[:, lane]):
            for name, values in alone.step(action).observation.items():
                np.testing.assert_array_equal(values, together[name][step, lane], err_msg=f"{name}, step {step}")


def test_simulations_of_one_model_show_the_expert_the_same_scene(fleet: LiberoFleet) -> None:
    fleet.reset("train", [4, 4])
    one, other = fleet.scene(0), fleet.scene(1)
    for name, body in one.bodies.items():
        np.testing.assert_array_equal(body.position, other.bodies[name].position, err_msg=name)
        np.testing.assert_array_equal(body.half_size, other.bodies[name].half_size, err_msg=name)
    np.testing.assert_array_equal(Expert().act(one), Expert().act(other))


def test_siblings_that_step_in_two_threads_at_once_play_what_separate_fleets_play(fleet: LiberoFleet) -> None:
    actions = random_actions(1, 3)
    states = [0, 1, 2], [9, 1, 4]
    siblings = [fleet, fleet.sibling()]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda one, start: play(one, start, actions), siblings, states))
    for played, start in zip(together, states, strict=True):
        assert_equal(played, play(LIBERO_MINI.make_fleet(fleet.task), start, actions))


def test_a_sibling_shares_the_compiled_model_and_leaves_its_origin_alone(fleet: LiberoFleet) -> None:
    before = {name: values.copy() for name, values in fleet.reset("train", [4, 9]).items()}
    sibling = fleet.sibling()
    sibling.reset("train", [5])
    sibling.step(random_actions(3, 1)[0], np.ones(1, np.bool_))
    assert sibling._lanes[0]._model is fleet._lanes[0]._model
    for lane in range(2):
        for name, values in fleet._lanes[lane].observe().items():
            np.testing.assert_array_equal(values, before[name][lane], err_msg=name)


def test_one_that_rests_stays_as_it_is_and_the_others_do_not_notice(fleet: LiberoFleet) -> None:
    actions = random_actions(2, 3)
    everybody = play(fleet, [5, 6, 7], actions)
    rested = play(fleet, [5, 6, 7], actions, np.array([True, False, True]))
    for name in ("proprio", "objects", "egocentric"):
        np.testing.assert_array_equal(rested[name][:, [0, 2]], everybody[name][:, [0, 2]])
        np.testing.assert_array_equal(rested[name][:, 1], np.broadcast_to(rested[name][0, 1], rested[name][:, 1].shape))


def test_one_whose_physics_is_unstable_is_told_apart_from_those_that_go_on(fleet: LiberoFleet) -> None:
    fleet.reset("train", [0, 1, 2])
    fleet._lanes[1]._data.qvel[:] = 1e12
    _, success, unstable = fleet.step(np.zeros((3, ACTION_DIM), np.float32), EVERY)
    assert unstable.tolist() == [False, True, False]
    assert not success.any()


def test_a_chunk_is_its_steps_one_by_one_bit_for_bit(fleet: LiberoFleet) -> None:
    actions, active = random_actions(6, 3), np.array([True, False, True])
    steps = play(fleet, [5, 6, 7], actions, active)
    fleet.reset("train", [5, 6, 7])
    after, made = fleet.advance(actions.swapaxes(0, 1), active)
    assert made.tolist() == [STEPS, 0, STEPS]
    for name, values in after.observation.items():
        np.testing.assert_array_equal(values, steps[name][-1], err_msg=name)


def test_simulations_that_step_in_the_threads_that_are_idle_play_what_they_play_one_after_the_other(
    fleet: LiberoFleet,
) -> None:
    actions, active = random_actions(8, 3), np.array([True, False, True])
    fleet.reset("train", [5, 6, 7])
    alone, made = fleet.advance(actions.swapaxes(0, 1), active)
    with ThreadPoolExecutor(2) as threads:
        together = fleet.sibling()
        together.share(threads)
        sibling = together.sibling()
        for one in (together, sibling):
            one.reset("train", [5, 6, 7])
            # The calling thread is one of those that could help, as the engine's are.
            after, steps = threads.submit(one.advance, actions.swapaxes(0, 1), active).result()
            assert steps.tolist() == made.tolist()
            for name, values in after.observation.items():
                np.testing.assert_array_equal(values, alone.observation[name], err_msg=name)


def test_a_chunk_ends_where_the_task_is_solved_and_goes_on_where_it_only_might_be() -> None:
    fleet, expert = LIBERO_MINI.make_fleet(LIBERO_MINI.tasks()[TRAY]), Expert()
    fleet.reset("eval", [3])
    actions: list[Array] = []
    while len(actions) < 100:  # the expert needs fewer
        actions.append(expert.act(fleet.scene(0)))
        if fleet.step(actions[-1][None], np.ones(1, np.bool_)).success[0]:
            break
    used = len(actions)
    expected = {name: values.copy() for name, values in fleet._observation.items()}
    fleet.reset("eval", [3, 3])
    rest = np.zeros((5, ACTION_DIM), np.float32)
    chunk = np.stack([np.concatenate([actions, rest]), np.zeros((used + 5, ACTION_DIM))]).astype(np.float32)
    after, made = fleet.advance(chunk, np.ones(2, np.bool_))
    assert (made.tolist(), after.success.tolist()) == ([used, used + 5], [True, False])
    for name, values in expected.items():
        np.testing.assert_array_equal(after.observation[name][0], values[0], err_msg=name)


def test_an_unstable_simulation_ends_its_chunk_and_no_other(fleet: LiberoFleet) -> None:
    fleet.reset("train", [0, 1, 2])
    fleet._lanes[1]._data.qvel[:] = 1e12
    after, made = fleet.advance(np.zeros((3, 4, ACTION_DIM), np.float32), EVERY)
    assert (made.tolist(), after.unstable.tolist()) == ([4, 1, 4], [False, True, False])


def test_a_bad_action_is_refused_before_any_simulation_moves(fleet: LiberoFleet) -> None:
    before = {name: values.copy() for name, values in fleet.reset("train", [0, 1, 2]).items()}
    actions = np.zeros((3, ACTION_DIM), np.float32)
    rest = actions.copy()
    actions[1, 3] = np.nan
    with pytest.raises(SimulatorError, match="place_can_in_tray, step 1:"):
        fleet.step(actions, EVERY)
    with pytest.raises(SimulatorError, match="place_can_in_tray, step 3:"):
        fleet.advance(np.stack([rest, rest, actions], axis=1), EVERY)
    for lane, env in enumerate(fleet._lanes[:3]):
        for name, values in env.observe().items():
            np.testing.assert_array_equal(values, before[name][lane])


@pytest.mark.parametrize("task", LIBERO_MINI.tasks(), ids=lambda task: task.name)
def test_success_is_what_liberos_predicates_say_on_every_step(task: Task) -> None:
    fleet, expert = LIBERO_MINI.make_fleet(task), Expert()
    fleet.reset("eval", [3])
    for _ in range(100):
        (success,) = fleet.step(expert.act(fleet.scene(0))[None], np.ones(1, np.bool_)).success
        assert success == fleet._lanes[0].is_solved()
        if success:
            return
    pytest.fail("the expert did not get there, so nothing was compared")


def test_what_is_shown_is_what_mujoco_holds(fleet: LiberoFleet) -> None:
    fleet.reset("train", [3, 8])
    shown = fleet.step(random_actions(5, 2)[0], np.ones(2, np.bool_)).observation
    for lane in range(2):
        scene, env = fleet.scene(lane), fleet._lanes[lane]
        can = scene.bodies[env._domain.obj_of_interest[0]]
        np.testing.assert_array_equal(shown["proprio"][lane, :3], scene.gripper_position.astype(np.float32))
        np.testing.assert_array_equal(shown["objects"][lane, :3], can.position.astype(np.float32))
        np.testing.assert_array_equal(shown["objects"][lane, 3:9], can.rotation[:, :2].T.ravel().astype(np.float32))
        offsets = [scene.bodies[name].position - scene.gripper_position for name in env._domain.obj_of_interest]
        np.testing.assert_array_equal(shown["egocentric"][lane, :6], shown["proprio"][lane, 2:])
        np.testing.assert_allclose(shown["egocentric"][lane, 6:12], np.concatenate(offsets), atol=1e-6)
        turned = Rotation.from_matrix(scene.gripper_rotation @ FACING_DOWN.T).as_rotvec()
        np.testing.assert_allclose(shown["proprio"][lane, 3:6], turned, atol=1e-6)
