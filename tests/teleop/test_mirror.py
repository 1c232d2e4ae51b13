"""The mirror: pictures of the newest state, however slowly they are drawn, and control never waits for one."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from nightshift import config, envs
from nightshift.envs.base import Fleet
from nightshift.errors import SimulatorError
from nightshift.teleop.mirror import SCENE, SCENE_TURNS, Frame, Mirror
from tests.teleop.serving import until

FORWARD = np.array([0.1, 0, 0, 0, 0, 0, -1], np.float32)
VIEWS = [SCENE, "agentview"]


class Gate:
    """Draws a picture whenever the test lets it."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.errors: list[BaseException] = []
        self._allowed = threading.Semaphore(0)

    def show(self, frame: Frame) -> None:
        self.frames.append(frame)
        self._allowed.acquire()

    def let(self, count: int) -> None:
        self._allowed.release(count)


@pytest.fixture
def fleet(params: config.Params) -> Fleet:
    cameras = params.env.cameras.model_copy(update={"names": ("agentview",), "size": 32})
    env = params.env.model_copy(update={"cameras": cameras})
    return envs.make_fleet(envs.tasks(env)[0], env)


def test_a_slow_picture_delays_no_step_and_the_next_one_is_of_the_newest_state(fleet: Fleet) -> None:
    gate = Gate()
    mirror = Mirror(VIEWS, lambda image: image, gate.show, gate.errors.append)
    mirror.show(fleet)
    mirror.reset(0, time=1.0)
    until(lambda: len(gate.frames) == 1)
    for step in range(50):  # while the first picture is on its way
        mirror.step(FORWARD, time=2.0 + step)
    gate.let(1)
    until(lambda: len(gate.frames) == 2)
    assert (gate.frames[1].step, gate.frames[1].time) == (50, 51.0)
    gate.let(10)
    until(lambda: {frame.view for frame in gate.frames if frame.step == 50} == set(VIEWS))
    mirror.close([fleet])
    assert not gate.errors


def test_while_the_robot_moves_the_scene_has_most_pictures_and_no_view_has_none(fleet: Fleet) -> None:
    gate = Gate()
    mirror = Mirror(VIEWS, lambda image: image, gate.show, gate.errors.append)
    mirror.show(fleet)
    mirror.reset(0, time=0.0)
    for count in range(1, 4 * SCENE_TURNS + 1):
        until(lambda count=count: len(gate.frames) == count)  # type: ignore[misc]
        mirror.step(FORWARD, time=0.0)
        gate.let(1)
    shown = [frame.view for frame in gate.frames[: 4 * SCENE_TURNS]]
    assert (shown.count(SCENE), shown.count("agentview")) == (4 * (SCENE_TURNS - 1), 4)
    gate.let(10)
    mirror.close([fleet])


def test_an_error_of_the_simulator_reaches_the_session(fleet: Fleet) -> None:
    gate = Gate()
    mirror = Mirror(VIEWS, lambda image: image, gate.show, gate.errors.append)
    mirror.show(fleet)
    mirror.step(np.zeros(3, np.float32), time=0.0)  # before a reset, and of another shape
    until(lambda: len(gate.errors) == 1)
    assert isinstance(gate.errors[0], SimulatorError)
    mirror.close([])


def test_nothing_waits_for_a_mirror_that_has_failed(fleet: Fleet) -> None:
    gate = Gate()
    mirror = Mirror(VIEWS, lambda image: image, gate.show, gate.errors.append)
    mirror.show(fleet)
    mirror.reset(0, time=0.0)
    until(lambda: len(gate.frames) == 1)
    mirror.step(np.zeros(2, np.float32), time=0.0)  # of another shape
    asked_before = mirror.look(["agentview"]), mirror.develop(FORWARD[None], ["agentview"])
    gate.let(1)
    until(lambda: len(gate.errors) == 1)
    for future in (*asked_before, mirror.look(["agentview"])):
        with pytest.raises(SimulatorError, match="the simulator that draws the pictures failed"):
            future.result(timeout=60)
    mirror.close([])
