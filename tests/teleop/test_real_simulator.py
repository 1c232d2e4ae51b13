"""A person at the controls of LIBERO's simulator; the scripted expert stands in for the person."""

from __future__ import annotations

from typing import Any, cast

import pytest

from nightshift import config
from nightshift.envs.libero.compiling import compile_control_step
from nightshift.policies.expert import Expert
from tests.robots import parts as robots
from tests.teleop.parts import assert_replays, rig, stored


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Before the test enters a project of its own: what is compiled for this checkout is loaded."""
    compile_control_step()


@pytest.mark.usefixtures("project")
def test_a_demo_of_the_real_simulator_replays_bit_for_bit(params: config.Params) -> None:
    env = params.env.model_copy(update={"suite": "libero_mini", "tasks": ("lift_cube",)})
    real = params.model_copy(update={"env": env})
    with rig(real) as one:
        one.begin()
        expert, plant = Expert(), cast(Any, one.session._plant)
        while one.phase == "running":
            action = expert.act(plant._fleets["lift_cube"].scene(0)).astype(float)
            one.drive(tuple(action[:6].tolist()), gripper="closed" if action[6] > 0 else "open")
        one.settle()
        assert not one.ear.errors
        (demo,) = stored(one.library)
        assert demo.success and demo.provenance.versions["mujoco"] != "none"
        assert {frame.view for frame in one.ear.frames} >= {"scene"}
    assert_replays(demo, env)


@pytest.mark.usefixtures("project")
def test_a_demo_on_the_real_simulator_as_a_robot_behind_http_is_the_same(params: config.Params) -> None:
    env = params.env.model_copy(update={"suite": "libero_mini", "tasks": ("lift_cube",)})
    with robots.faulty_server(env) as server:
        robot = robots.robot_env(env, robots.settings(server.url, server.arm.description))
        with rig(params.model_copy(update={"env": robot})) as one:
            one.begin()
            expert = Expert()
            while one.phase == "running":
                action = expert.act(server.arm.scene()).astype(float)
                one.drive(tuple(action[:6].tolist()), gripper="closed" if action[6] > 0 else "open")
            one.settle()
            (demo,) = stored(one.library)
    assert demo.success and demo.provenance.suite == "robot" and demo.metadata["judge"] == "server"
    assert_replays(demo, env)
