"""The protocol of a robot server, without HTTP: sessions, sequence numbers, limits, the watchdog and the stop.

A request is an endpoint and a JSON body, the answer a status and a JSON body. Commands are executed one after the
other. /stop and the watchdog do not wait for them.
"""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from nightshift.envs.robot.messages import (
    POSE,
    BadMessage,
    Mode,
    Refusal,
    RobotState,
    dumps,
    loads,
    number,
    scene_content,
    state_content,
    text,
    vector,
    whole,
)
from nightshift.envs.robot.poses import Scale, target_of
from nightshift.envs.robot.safety import state_problem, target_problem
from nightshift.robot_server.arm import Arm, Vector

Content = dict[str, Any]
Answer = tuple[int, bytes]

IMMEDIATE = ("describe", "stop", "release")
"""Endpoints that never wait for a command."""
_GRIPPER_RANGE = 255
_MISMATCH = 1e-5
"""Metres and radians by which the target that a command carries may differ from the one its action stands for."""


@dataclass
class _Session:
    name: str
    seq: int = 0
    request: tuple[str, bytes] = ("", b"")
    answer: Answer = (200, b"")


class Controller:
    """Example:

    controller = Controller(arm)
    status, body = controller.handle("describe", b"{}")
    """

    def __init__(self, arm: Arm, *, clock: Callable[[], float] = time.monotonic, token: str = "") -> None:
        self._arm = arm
        self._described = arm.description
        self._clock = clock
        self._token = token
        self._lock = threading.Lock()
        self._session: _Session | None = None
        self._mode: Mode = "held"
        self._why = "it has not been cleared since the server started"
        self._latched = False
        self._executing = False
        self._last_command = clock()
        self._home = np.array([0.0, 0.0, 0.0, 1.0])
        self._commands: dict[str, Callable[[Content], Content]] = {
            "pose": self._pose,
            "open_gripper": lambda content: self._grip(content, 1.0),
            "close_gripper": lambda content: self._grip(content, 0.0),
            "move_gripper": self._move_gripper,
            "jointreset": self._joint_reset,
            "reset": self._reset,
            "clearerr": self._clear_error,
            "update_param": self._update_param,
        }
        self._reads = {"getstate": self._get_state, "scene": self._scene}

    def handle(self, endpoint: str, body: bytes, authorization: str = "") -> Answer:
        seq: Any = None
        try:
            self._authorize(authorization)
            content = loads(body or b"{}")
            seq = content.get("seq")
            return self._answer(endpoint, content, body)
        except BadMessage as error:
            return _refused(Refusal(_code(error), str(error)), seq)
        except Refusal as refusal:
            return _refused(refusal, seq)

    def check_watchdog(self) -> None:
        """Call it several times per `watchdog_s`, from any thread: it works when the network does not."""
        silent = self._clock() - self._last_command
        if self._mode == "ready" and not self._executing and silent > self._described.watchdog_s:
            self._mode, self._why = "held", f"no command came for {silent:.2f} s"
            self._arm.hold()

    def stop(self, why: str, *, latched: bool = False) -> None:
        self._mode, self._why = "stopped", why
        self._latched = self._latched or latched
        self._arm.stop()

    def _authorize(self, authorization: str) -> None:
        if self._token and not hmac.compare_digest(authorization.encode(), f"Bearer {self._token}".encode()):
            raise Refusal("unauthorized", "the token in the header Authorization is missing or wrong")

    def _answer(self, endpoint: str, content: Content, body: bytes) -> Answer:
        if endpoint in IMMEDIATE:
            return _accepted(self._immediate(endpoint, content))
        with self._lock:
            self.check_watchdog()
            if endpoint == "open":
                return _accepted(self._open())
            if endpoint == "getstate" and "session" not in content:
                return _accepted(self._get_state(content))
            if endpoint not in (*self._commands, *self._reads, "close"):
                raise Refusal("unknown", f"there is no endpoint {endpoint}")
            return self._in_session(endpoint, content, body)

    def _immediate(self, endpoint: str, content: Content) -> Content:
        if endpoint == "stop":
            by_person = content.get("latched", False)
            self.stop(str(content.get("reason", "a client asked for it")), latched=by_person is True)
            return {"mode": self._mode}
        if endpoint == "release":
            self._latched = False
            return {"mode": self._mode}
        return asdict(self._described)

    def _open(self) -> Content:
        if self._session is not None and self._mode == "ready":
            raise Refusal("busy", "another session commands this robot")
        self._session = _Session(secrets.token_hex(8))
        self._home = self._arm.measure(()).pose[3:]
        return {"session": self._session.name, "time": self._clock(), "mode": self._mode}

    def _in_session(self, endpoint: str, content: Content, body: bytes) -> Answer:
        session = self._session
        if session is None or content.get("session") != session.name:
            raise Refusal("no_session", "this is not the session that commands the robot: /open begins one")
        seq = whole(content, "seq")
        if seq == session.seq:
            if session.request != (endpoint, body):
                raise Refusal("seq_conflict", f"seq {seq} was another request before")
            return session.answer
        if seq < session.seq:
            raise Refusal("old_seq", f"seq {seq} comes after {session.seq}")
        try:
            answer = _accepted({**self._execute(endpoint, content), "seq": seq})
        except (BadMessage, Refusal) as error:
            refusal = error if isinstance(error, Refusal) else Refusal(_code(error), str(error))
            answer = _refused(refusal, seq)
        session.seq, session.request, session.answer = seq, (endpoint, body), answer
        return answer

    def _execute(self, endpoint: str, content: Content) -> Content:
        if endpoint == "close":
            self._session = None
            if self._mode == "ready":
                self._mode, self._why = "held", "the session was closed"
                self._arm.hold()
            return {"mode": self._mode}
        if endpoint in self._reads:
            return self._reads[endpoint](content)
        if endpoint != "clearerr":
            self._require_ready()
        self._executing = True
        try:
            return self._commands[endpoint](content)
        except (BadMessage, Refusal):
            raise
        except Exception as error:
            self.stop(f"the arm failed: {error!r}")
            raise Refusal("failed", f"the arm failed: {error!r}") from error
        finally:
            self._last_command = self._clock()
            self._executing = False

    def _require_ready(self) -> None:
        if self._mode != "ready":
            raise Refusal(self._mode, f"the robot is {self._mode}: {self._why}; /clearerr makes it ready")

    def _pose(self, content: Content) -> Content:
        target = vector(content, "arr", POSE)
        age = self._clock() - number(content, "based_on")
        if not 0 <= age <= self._described.command_age_s:
            raise Refusal("stale", f"the state that the command was decided on is {age:.3f} s old")
        gripper = None if content.get("gripper") is None else number(content, "gripper")
        if gripper is not None and not 0 <= gripper <= 1:
            raise BadMessage(f"gripper should be from 0, closed, to 1, open, and is {gripper}")
        before = self._arm.measure(())
        problem = target_problem(target, before.pose, self._home, self._described.limits, self._described.control_hz)
        if problem:
            raise Refusal("outside_limits", problem)
        self._arm.move(target, gripper, self._action(content, before, target))
        return self._state(content)

    def _action(self, content: Content, before: RobotState, target: Vector) -> Vector | None:
        """The limits are checked on the target, so an action that stands for another one is refused."""
        if content.get("action") is None:
            return None
        if self._described.action_scale is None:
            raise Refusal("unknown", "this server does not announce the capability action")
        action = vector(content, "action", self._described.action_size)
        implied = target_of(before.pose, action, Scale(*self._described.action_scale))
        difference = min(np.abs(implied - target).max(), np.abs(implied * _NEGATED - target).max())
        if difference > _MISMATCH:
            raise BadMessage(f"arr is not the target of action: they differ by {difference:.2g}")
        return action

    def _grip(self, content: Content, opening: float) -> Content:
        self._arm.grip(opening)
        return self._state(content)

    def _move_gripper(self, content: Content) -> Content:
        position = number(content, "gripper_pos")
        if not 0 <= position <= _GRIPPER_RANGE:
            raise BadMessage(f"gripper_pos should be from 0, closed, to {_GRIPPER_RANGE}, open, and is {position}")
        return self._grip(content, position / _GRIPPER_RANGE)

    def _joint_reset(self, content: Content) -> Content:
        self._arm.joint_reset()
        return self._after_reset(content)

    def _reset(self, content: Content) -> Content:
        if "init_states" not in self._described.capabilities:
            raise Refusal("unknown", "this server does not announce the capability init_states")
        task, split, number_of = text(content, "task"), text(content, "split"), whole(content, "init_state")
        (known,) = [known for known in self._described.tasks if known.name == task] or (None,)
        if known is None or not 0 <= number_of < known.init_states.get(split, 0):
            raise BadMessage(f"there is no start {number_of} of {task} in {split}")
        self._arm.reset(task, split, number_of)
        return self._after_reset(content)

    def _after_reset(self, content: Content) -> Content:
        self._home = self._arm.measure(()).pose[3:]
        return self._state(content)

    def _clear_error(self, content: Content) -> Content:
        if self._latched:
            raise Refusal("latched", f"a person stopped the robot: {self._why}; /release frees it")
        self._arm.clear_error()
        self._mode, self._why = "ready", ""
        return self._state(content)

    def _update_param(self, content: Content) -> Content:
        values = content.get("params")
        if not isinstance(values, dict):
            raise BadMessage("params should be an object of names and numbers")
        unknown = sorted(set(values) - set(self._described.compliance))
        if unknown:
            raise BadMessage(f"there is no compliance parameter {', '.join(unknown)}")
        self._arm.update_param({name: number(values, name) for name in values})
        return self._state(content)

    def _get_state(self, content: Content) -> Content:
        return self._state(content)

    def _scene(self, content: Content) -> Content:
        if "scene" not in self._described.capabilities:
            raise Refusal("unknown", "this server does not announce the capability scene")
        return {"scene": scene_content(self._arm.scene())}

    def _state(self, content: Content) -> Content:
        cameras = content.get("cameras", [])
        if not isinstance(cameras, list) or not set(map(str, cameras)) <= set(self._described.cameras):
            raise BadMessage(f"cameras should be some of {', '.join(self._described.cameras)}, and is {cameras}")
        state = self._arm.measure(cameras)
        problem = "" if state.unstable else state_problem(state, self._described.limits)
        if problem and self._mode == "ready":
            self.stop(problem)
            raise Refusal("stopped", problem)
        return state_content(replace(state, mode=self._mode))


_NEGATED = np.array([1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0])
"""A quaternion and its negative are one orientation."""


def _code(error: BadMessage) -> str:
    return "not_finite" if "not finite" in str(error) else "bad_request"


def _accepted(content: Content) -> Answer:
    try:
        return 200, dumps(content)
    except BadMessage as error:
        return _refused(Refusal("failed", f"the arm measured something that is not finite: {error}"), None)


def _refused(refusal: Refusal, seq: Any) -> Answer:
    sent = seq if isinstance(seq, int) else None
    return refusal.status, dumps({"error": refusal.code, "what": refusal.what, "seq": sent})
