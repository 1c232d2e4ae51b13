"""Protocols: the numbers of the papers, and the conversions that go with them, against robosuite's and LIBERO's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nightshift import config, envs
from nightshift.envs import protocols
from nightshift.envs.base import flipped
from nightshift.envs.libero.env import LiberoEnv
from nightshift.envs.libero.suites import AS_LIBERO_DRAWS, BENCHMARK_SUITES, LIBERO_SPATIAL
from nightshift.envs.mini.suite import LIBERO_MINI
from nightshift.envs.protocols import PROTOCOLS, Protocol
from nightshift.errors import SimulatorError
from tests.conftest import REPOSITORY

PLATE = 2
CLOSE = 3.0
"""Grey levels that two renderers may differ by on average."""


@pytest.fixture(scope="module")
def env() -> Iterator[LiberoEnv]:
    made = LIBERO_MINI.make_env(LIBERO_MINI.tasks()[PLATE])
    yield made
    made.close()


@pytest.fixture(scope="module")
def liberos_own(env: LiberoEnv) -> Iterator[Any]:
    """LIBERO's environment with cameras, as its users build it; skips where it cannot draw."""
    env.reset("eval", 0)
    if env.render() is None:
        pytest.skip("no GL library works here")
    from libero.libero.envs.env_wrapper import OffScreenRenderEnv

    problem = LIBERO_MINI.problem(env.task)
    made = OffScreenRenderEnv(
        bddl_file_name=str(problem.bddl), scene_xml=str(problem.scene), camera_heights=256, camera_widths=256
    )
    for name in [name for name in made.env._observables if not name.startswith(("robot0_", "agentview_"))]:
        made.env._observables.pop(name)  # of objects: they take seconds to compile
    yield made
    made.close()


def selected(**changes: Any) -> config.Env:
    chosen = {"suite": "libero_goal", "tasks": (), "protocol": "openvla-oft", "horizon": "auto"}
    cameras = {"names": ("wrist",), "size": 128, "shadows": False}
    return config.Env.model_validate({**chosen, "cameras": cameras, **changes})


@pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=PROTOCOLS)
def test_a_protocol_says_how_long_every_suite_of_liberos_is_played(protocol: Protocol) -> None:
    assert set(protocol.max_steps) == {suite.name for suite in BENCHMARK_SUITES}
    assert len(protocol.settle_action) == LIBERO_SPATIAL.action_space.size


@pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=PROTOCOLS)
def test_the_documentation_shows_the_numbers_of_the_table(protocol: Protocol) -> None:
    steps = " / ".join(str(protocol.max_steps[suite.name]) for suite in BENCHMARK_SUITES)
    action = "gripper open" if protocol.settle_action[-1] else "zeros"
    size = f"{protocol.resolution}², {'rotated' if protocol.rotated else 'as LIBERO'}"
    row = f"| `{protocol.name}` | {steps} | {protocol.settle_steps} × {action} | {size} | {protocol.trials} |"
    assert row in (REPOSITORY / "docs" / "libero.md").read_text()


def test_an_automatic_horizon_is_the_protocols_for_the_suite() -> None:
    assert envs.horizons(selected()) == {"libero_goal": 300}
    assert envs.horizons(selected(suite="libero_10", protocol="rlinf")) == {"libero_10": 512}
    assert envs.horizons(selected(horizon=77)) == {"libero_goal": 77}


def test_an_automatic_horizon_of_a_suite_no_paper_has_is_refused_with_what_to_write() -> None:
    with pytest.raises(SimulatorError, match=r"no number of steps for libero_mini[\s\S]*env\.horizon"):
        envs.horizons(selected(suite="libero_mini"))


def test_an_unknown_protocol_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SimulatorError, match=r"openvla-oft, simplevla-rl, rlinf"):
        envs.horizons(selected(protocol="openvla"))


def test_states_of_libero_mini_are_at_rest_and_only_real_suites_are_given_time_to_settle() -> None:
    assert LIBERO_MINI.settle_steps(PROTOCOLS["rlinf"]) == 0
    assert LIBERO_SPATIAL.settle_steps(PROTOCOLS["rlinf"]) == 15


@pytest.mark.parametrize(("model", "wanted"), [(1.0, -1.0), (0.0, 1.0), (0.9, -1.0), (0.2, 1.0), (0.5, 0.0)])
def test_a_models_open_gripper_is_minus_one_in_the_environment(model: float, wanted: float) -> None:
    assert protocols.gripper_to_env(model) == wanted


def test_rotating_an_image_twice_gives_it_back() -> None:
    image = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
    assert np.array_equal(protocols.rotate(image)[0, 0], image[3, 4])
    assert np.array_equal(protocols.rotate(protocols.rotate(image)), image)


def test_state_and_full_state_are_what_libero_reports_for_the_same_init_state(env: LiberoEnv, liberos_own: Any) -> None:
    from robosuite.utils.transform_utils import quat2axisangle

    state = env.reset("eval", 3)["state"]
    seen = liberos_own.set_init_state(LIBERO_MINI.load_init_states(env.task, "eval")[3])
    turned = quat2axisangle(seen["robot0_eef_quat"].copy())
    expected = np.concatenate([seen["robot0_eef_pos"], turned, seen["robot0_gripper_qpos"]])
    np.testing.assert_allclose(state, expected, atol=1e-5)
    np.testing.assert_array_equal(env.full_state(), liberos_own.get_sim_state())


def test_camera_images_are_liberos_own_rotated(env: LiberoEnv, liberos_own: Any) -> None:
    env.reset("eval", 5)
    seen = liberos_own.set_init_state(LIBERO_MINI.load_init_states(env.task, "eval")[5])
    images = env.camera_images(LIBERO_MINI.cameras)
    for camera, name in {"agentview": "agentview_image", "wrist": "robot0_eye_in_hand_image"}.items():
        ours, theirs = images[camera], seen[name][::-1, ::-1]
        assert (ours.shape, ours.dtype.name) == ((256, 256, 3), "uint8")
        assert np.abs(ours.astype(float) - theirs).mean() < CLOSE
        assert np.abs(ours.astype(float) - theirs[::-1, ::-1]).mean() > 5 * CLOSE, "it would tell a wrong rotation"


def test_a_picture_for_people_is_not_mirrored_and_has_no_shadows() -> None:
    without_shadows = AS_LIBERO_DRAWS.model_copy(update={"shadows": False})
    with contextlib.closing(LIBERO_MINI.make_env(LIBERO_MINI.tasks()[PLATE], cameras=without_shadows)) as env:
        env.reset("eval", 5)
        upright = env.render()
        if upright is None:
            pytest.skip("no GL library works here")
        seen = env.camera_images(["agentview"])["agentview"]
        np.testing.assert_array_equal(upright[:, ::-1], seen)
        drawing = LIBERO_MINI.drawing(protocols.DEFAULT, without_shadows)
        np.testing.assert_array_equal(flipped(seen, LIBERO_MINI.flip(drawing)), upright)


def test_conditions_name_the_gl_backend_exactly_where_pictures_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "egl")
    blind, seeing = envs.conditions(selected(), []), envs.conditions(selected(), ["wrist"])
    assert blind["pictures"] == "not used"
    assert seeing["pictures"] == {
        "cameras": ["wrist"],
        "resolution": 256,
        "size": 128,
        "shadows": False,
        "rotated": True,
        "gl": "egl",
    }
    assert set(blind["versions"]) >= {"mujoco", "robosuite", "libero"}
    assert (blind["horizon"], blind["settle_steps"]) == (300, 10)
