"""A stop has the last word, whatever the arm is doing; the watchdog outlives an arm that fails."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nightshift.envs.robot.messages import RobotState
from nightshift.envs.robot.poses import Vector
from nightshift.robot_server.controller import Controller
from nightshift.types import Scene
from tests.robots.parts import FAKE, ManualClock, WatchedArm

WATCHDOG_S = 2.0
START = {"task": "near", "split": "train", "init_state": 1}


class SlowArm(WatchedArm):
    """Waits in the calls that a test names, until it lets them go on; and does all it is told, even after a stop."""

    def __init__(self, clock: ManualClock) -> None:
        self.slow = self.failing = ""
        self.entered, self.goes_on = threading.Event(), threading.Event()
        self.state: dict[str, Any] = {}
        super().__init__(FAKE, watchdog_s=WATCHDOG_S, clock=clock)

    def _does(self, what: str) -> None:
        if what == self.slow:
            self.slow = ""
            self.entered.set()
            assert self.goes_on.wait(60)
        if what == self.failing:
            self.failing = ""
            raise ConnectionResetError(f"no {what}")
        self.told.append(what)

    def measure(self, cameras: Sequence[str]) -> RobotState:
        self._does("measure")
        return replace(super().measure(cameras), **self.state)

    def move(self, target: Vector, gripper: float | None, action: Vector | None) -> None:
        self._does("move")

    def grip(self, opening: float) -> None:
        self._does("grip")

    def joint_reset(self) -> None:
        self._does("joint_reset")

    def reset(self, task: str, split: str, init_state: int) -> None:
        self._does("reset")
        super().reset(task, split, init_state)

    def scene(self) -> Scene:
        self._does("scene")
        return super().scene()

    def clear_error(self) -> None:
        self._does("clear_error")

    def hold(self) -> None:
        self._does("hold")

    def stop(self) -> None:
        self._does("stop")

    @property
    def movements(self) -> list[str]:
        return [told for told in self.told if told not in ("measure", "clear_error", "scene")]


class Rig:
    """A controller with a session on a robot that is ready, without HTTP."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.arm = SlowArm(self.clock)
        self.controller = Controller(self.arm, clock=self.clock)
        self.session = self.ask("open")["session"]
        self._seq = 0
        self.command("clearerr")
        self.arm.told.clear()

    def ask(self, endpoint: str, **content: Any) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.controller.handle(endpoint, json.dumps(content).encode())[1])
        return answer

    def command(self, endpoint: str, **content: Any) -> dict[str, Any]:
        self._seq += 1
        return self.ask(endpoint, **content, session=self.session, seq=self._seq)

    def pose(self) -> dict[str, Any]:
        now = self.ask("getstate")
        return {"arr": now["pose"], "based_on": now["time"]}

    def during(self, slow: str, command: Callable[[], dict[str, Any]], meanwhile: Callable[[], Any]) -> dict[str, Any]:
        """What `command` is answered if `meanwhile` happens while the arm is in the call `slow`."""
        self.arm.slow = slow
        with ThreadPoolExecutor(1) as thread:
            answered = thread.submit(command)
            assert self.arm.entered.wait(60)
            try:
                meanwhile()
            finally:
                self.arm.goes_on.set()
            return answered.result(60)


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.mark.parametrize(("latched", "code"), [(False, "stopped"), (True, "latched")])
def test_a_stop_that_comes_while_the_error_is_cleared_wins(rig: Rig, latched: bool, code: str) -> None:
    def stop() -> None:
        assert rig.ask("stop", latched=latched)["mode"] == "stopped"

    answer = rig.during("clear_error", lambda: rig.command("clearerr"), stop)
    assert answer["error"] == code
    assert rig.ask("getstate")["mode"] == "stopped"
    assert rig.arm.told.index("clear_error") < len(rig.arm.told) - 1 - rig.arm.told[::-1].index("stop")
    assert rig.command("pose", **rig.pose())["error"] == code
    assert "move" not in rig.arm.told


@pytest.mark.parametrize(("latched", "code"), [(False, "stopped"), (True, "latched")])
def test_a_stop_that_comes_while_a_command_is_checked_leaves_nothing_to_move(
    rig: Rig, latched: bool, code: str
) -> None:
    still = rig.pose()
    answer = rig.during("measure", lambda: rig.command("pose", **still), lambda: rig.ask("stop", latched=latched))
    assert answer["error"] == code
    assert rig.arm.movements == ["stop"]


@pytest.mark.parametrize(
    ("call", "endpoint", "content"),
    [("grip", "open_gripper", {}), ("joint_reset", "jointreset", {}), ("reset", "reset", START), ("move", "pose", {})],
)
def test_a_stop_that_comes_while_the_arm_moves_is_repeated_after_it(
    rig: Rig, call: str, endpoint: str, content: dict[str, Any]
) -> None:
    content = content or (rig.pose() if endpoint == "pose" else {})
    answer = rig.during(call, lambda: rig.command(endpoint, **content), lambda: rig.ask("stop"))
    assert answer["error"] == "stopped"
    assert rig.arm.movements == ["stop", call, "stop"]


def test_a_stop_that_comes_while_the_watchdog_holds_is_repeated_after_it(rig: Rig) -> None:
    rig.clock.sleep(WATCHDOG_S + 1)

    def watch() -> dict[str, Any]:
        rig.controller.check_watchdog()
        return {}

    rig.during("hold", watch, lambda: rig.ask("stop"))
    assert rig.arm.movements == ["stop", "hold", "stop"]
    assert rig.ask("getstate")["mode"] == "stopped"


def test_what_a_person_said_stays_until_the_release(rig: Rig) -> None:
    rig.ask("stop", reason="too close", latched=True)
    rig.ask("stop", reason="a client gives up")
    assert "too close" in rig.command("clearerr")["what"]
    rig.ask("release")
    assert rig.command("pose", **rig.pose())["error"] == "stopped"
    assert rig.command("clearerr")["mode"] == "ready"


def test_a_request_to_stop_that_cannot_be_read_stops_the_robot(rig: Rig) -> None:
    assert rig.controller.handle("stop", b"{no JSON")[0] == 400
    assert rig.arm.movements == ["stop"]


@pytest.mark.parametrize("halt", ["hold", "stop"])
def test_a_hold_or_stop_that_fails_is_tried_again_by_the_watchdog(rig: Rig, halt: str) -> None:
    rig.arm.failing = halt
    if halt == "hold":
        rig.clock.sleep(WATCHDOG_S + 1)
        rig.controller.check_watchdog()
    else:
        assert rig.ask("stop")["error"] == "failed"
    assert halt not in rig.arm.told
    assert rig.command("pose", **rig.pose())["error"] in ("held", "stopped")
    rig.controller.check_watchdog()
    assert rig.arm.movements == [halt]
    rig.controller.check_watchdog()
    assert rig.arm.movements == [halt]


@pytest.mark.parametrize("name", ["pose", "vel", "force", "torque", "q", "dq"])
def test_a_measurement_that_is_not_finite_stops_the_arm(rig: Rig, name: str) -> None:
    still = rig.pose()
    rig.arm.state = {name: np.full(getattr(rig.arm.measure(()), name).shape, np.nan)}
    answer = rig.command("pose", **still)
    assert (answer["error"], answer["seq"]) == ("failed", 2)
    assert rig.arm.movements == ["stop"]
    rig.arm.state = {}
    assert rig.ask("getstate")["mode"] == "stopped"


@pytest.mark.parametrize(("endpoint", "call"), [("getstate", "measure"), ("scene", "scene")])
def test_a_read_that_fails_is_refused_stops_the_arm_and_is_remembered(rig: Rig, endpoint: str, call: str) -> None:
    body = json.dumps({"session": rig.session, "seq": 9}).encode()
    rig.arm.failing = call
    status, answer = rig.controller.handle(endpoint, body)
    assert status == 500
    assert json.loads(answer)["error"] == "failed"
    assert json.loads(answer)["seq"] == 9
    assert rig.arm.movements == ["stop"]
    assert rig.controller.handle(endpoint, body) == (status, answer)


def test_an_arm_that_fails_when_a_session_is_opened_is_refused_and_stopped() -> None:
    arm = SlowArm(ManualClock())
    controller = Controller(arm)
    arm.failing = "measure"
    status, answer = controller.handle("open", b"{}")
    assert (status, json.loads(answer)["error"]) == (500, "failed")
    assert "stop" in arm.told


def test_a_command_that_is_refused_does_not_keep_the_robot_ready(rig: Rig) -> None:
    for _ in range(3):
        rig.clock.sleep(0.4 * WATCHDOG_S)
        rig.command("open_gripper", cameras=["no such camera"])
    assert rig.ask("getstate")["mode"] == "held"
    assert rig.arm.movements == ["hold"]


def test_a_new_session_does_not_make_the_present_orientation_the_home_of_max_turn(rig: Rig) -> None:
    turned = np.array([0.0, 0.0, 0.0, np.sin(1.0), 0.0, 0.0, np.cos(1.0)])
    limits = replace(rig.arm.description.limits, max_turn=1.0)
    rig.arm._description = replace(rig.arm.description, limits=limits)
    rig.controller = Controller(rig.arm, clock=rig.clock)
    for pose in (rig.arm.measure(()).pose, turned):
        rig.arm.state = {"pose": pose}
        rig.session, rig._seq = rig.ask("open")["session"], 0
        rig.command("clearerr")
        answer = rig.command("pose", **rig.pose())
        rig.command("close")
    assert "from the reset" in answer["what"]
