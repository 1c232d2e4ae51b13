"""The protocol of a robot server, without HTTP: sessions, sequence numbers, limits, the watchdog and the stop.

A request is an endpoint and a JSON body, the answer a status and a JSON body. Commands are executed one after the
other. /stop and the watchdog do not wait for them: a stop comes at any time, from any thread, and has the last word.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from nightshift.envs.robot.messages import (
    EXTENSIONS,
    GRIPPER_RANGE,
    POSE,
    STATE_SHAPES,
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
from nightshift.envs.robot.poses import Scale, Vector, target_of
from nightshift.envs.robot.safety import state_problem, target_problem
from nightshift.robot_server.arm import Arm

_log = logging.getLogger(__name__)

Content = dict[str, Any]
Answer = tuple[int, bytes]

IMMEDIATE = ("describe", "stop", "release")
"""Endpoints that never wait for a command."""
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
        self._turn = threading.Lock()
        """Of the request that is carried out."""
        self._modes = threading.Lock()
        """Of the mode, the latch and the count of stops; never held while the arm works, so that a stop never waits."""
        self._session: _Session | None = None
        self._mode: Mode = "held"
        self._why = "it has not been cleared since the server started"
        self._latched = False
        self._stops = 0
        self._halt_failed = False
        self._executing = False
        self._last_command = clock()
        self._home: Vector | None = None
        """The orientation after the last reset; before the first, that of the first session."""
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
        self._reads = {"getstate": self._state, "scene": self._scene}

    @property
    def watchdog_s(self) -> float:
        return self._described.watchdog_s

    def handle(self, endpoint: str, body: bytes, authorization: str = "") -> Answer:
        seq: Any = None
        try:
            self._authorize(authorization)
            content = loads(body or b"{}")
            seq = content.get("seq")
            return self._answer(endpoint, content, body)
        except BadMessage as error:
            if endpoint == "stop":
                self.stop("a request to stop that cannot be read")
            return _refused(Refusal(_code(error), str(error)), seq)
        except Refusal as refusal:
            return _refused(refusal, seq)

    def check_watchdog(self) -> None:
        """Call it several times per `watchdog_s`, from any thread: it works when the network does not."""
        if self._halt_failed:
            self._halt()
        with self._modes:
            silent = self._clock() - self._last_command
            is_due = self._mode == "ready" and not self._executing and silent > self._described.watchdog_s
            if is_due:
                self._mode, self._why = "held", f"no command came for {silent:.2f} s"
        if is_due:
            self._halt()

    def stop(self, why: str, *, latched: bool = False) -> bool:
        """Whether the arm did it. If it failed, the watchdog tries again."""
        with self._modes:
            if latched or not self._latched:  # what a person said stays
                self._why = why
            self._mode = "stopped"
            self._latched = self._latched or latched
            self._stops += 1
        return self._halt()

    def _halt(self) -> bool:
        """Have the arm stop or hold, as the mode says. A stop that comes during a hold is carried out after it."""
        while True:
            with self._modes:
                mode, stops = self._mode, self._stops
            try:
                if mode == "stopped":
                    self._arm.stop()
                elif mode == "held":
                    self._arm.hold()
            except Exception:  # noqa: BLE001 - it is tried again, whatever it was
                _log.exception("the arm is %s, and failed to do it; the watchdog tries again", mode)
                self._halt_failed = True
                return False
            with self._modes:
                if stops == self._stops:
                    self._halt_failed = False
                    return True

    def _authorize(self, authorization: str) -> None:
        if self._token and not hmac.compare_digest(authorization.encode(), f"Bearer {self._token}".encode()):
            raise Refusal("unauthorized", "the token in the header Authorization is missing or wrong")

    def _answer(self, endpoint: str, content: Content, body: bytes) -> Answer:
        if endpoint in IMMEDIATE:
            return 200, dumps(self._immediate(endpoint, content))
        with self._turn:
            self.check_watchdog()
            if endpoint == "open":
                return self._performed(self._open)
            if endpoint == "getstate" and "session" not in content:
                return self._performed(lambda: self._state(content))
            if endpoint not in (*self._commands, *self._reads, "close"):
                raise Refusal("unknown", f"there is no endpoint {endpoint}")
            return self._in_session(endpoint, content, body)

    def _immediate(self, endpoint: str, content: Content) -> Content:
        if endpoint == "stop":
            by_person = content.get("latched", False)
            if not self.stop(str(content.get("reason", "a client asked for it")), latched=by_person is True):
                raise Refusal("failed", "the arm failed to stop; it is told again until it does")
            return {"mode": self._mode}
        if endpoint == "release":
            with self._modes:
                self._latched = False
            return {"mode": self._mode}
        return asdict(self._described)

    def _open(self) -> Content:
        if self._session is not None and self._mode == "ready":
            raise Refusal("busy", "another session commands this robot")
        if self._home is None:
            self._home = self._measured().pose[3:]
        self._session = _Session(secrets.token_hex(8))
        return {"session": self._session.name, "time": self._clock(), "mode": self._mode}

    def _performed(self, act: Callable[[], Content], **more: Any) -> Answer:
        """The answer to what `act` did. An arm that fails, or measures what is not finite, is stopped."""
        try:
            done = act()
        except (BadMessage, Refusal):
            raise
        except Exception as error:
            raise self._failed(repr(error)) from error
        try:
            return 200, dumps({**done, **more})
        except BadMessage as error:
            raise self._failed(f"it measured something that is not finite: {error}") from error

    def _failed(self, why: str) -> Refusal:
        """Stop; the error to raise."""
        self.stop(f"the arm failed: {why}")
        return Refusal("failed", f"the arm failed: {why}")

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
            answer = self._performed(lambda: self._execute(endpoint, content), seq=seq)
        except (BadMessage, Refusal) as error:
            refusal = error if isinstance(error, Refusal) else Refusal(_code(error), str(error))
            answer = _refused(refusal, seq)
        session.seq, session.request, session.answer = seq, (endpoint, body), answer
        return answer

    def _execute(self, endpoint: str, content: Content) -> Content:
        self._require_announced(endpoint)
        self._check_cameras(content)
        if endpoint == "close":
            return self._close()
        if endpoint in self._reads:
            return self._reads[endpoint](content)
        with self._modes:
            if endpoint != "clearerr":
                self._require_ready()
            self._executing = True
        try:
            done = self._commands[endpoint](content)
            self._last_command = self._clock()
        finally:
            self._executing = False
        return done

    def _require_announced(self, endpoint: str) -> None:
        capability = EXTENSIONS.get(endpoint)
        if capability is not None and capability not in self._described.capabilities:
            raise Refusal("unknown", f"this server does not announce the capability {capability}")

    def _close(self) -> Content:
        self._session = None
        with self._modes:
            was_ready = self._mode == "ready"
            if was_ready:
                self._mode, self._why = "held", "the session was closed"
        if was_ready:
            self._halt()
        return {"mode": self._mode}

    def _require_released(self) -> None:
        """With the lock of the modes."""
        if self._latched:
            raise Refusal("latched", f"a person stopped the robot: {self._why}; /release frees it")

    def _require_ready(self) -> None:
        """With the lock of the modes."""
        self._require_released()
        if self._mode != "ready":
            raise Refusal(self._mode, f"the robot is {self._mode}: {self._why}; /clearerr makes it ready")

    def _move(self, act: Callable[[], None]) -> None:
        """Let the arm move if the robot is ready at this moment, and not when the request was read."""
        with self._modes:
            self._require_ready()
            stops = self._stops
        act()
        self._obey_stops_since(stops)

    def _obey_stops_since(self, stops: int) -> None:
        """A stop that came while the arm did something is repeated, whatever the arm made of it."""
        with self._modes:
            if stops == self._stops:
                return
        self._halt()
        with self._modes:
            self._require_ready()

    def _pose(self, content: Content) -> Content:
        target = vector(content, "arr", POSE)
        age = self._clock() - number(content, "based_on")
        if not 0 <= age <= self._described.command_age_s:
            raise Refusal("stale", f"the state that the command was decided on is {age:.3f} s old")
        gripper = None if content.get("gripper") is None else number(content, "gripper")
        if gripper is not None and not 0 <= gripper <= 1:
            raise BadMessage(f"gripper should be from 0, closed, to 1, open, and is {gripper}")
        before = self._measured()
        assert self._home is not None, "/open measures it"
        problem = target_problem(target, before.pose, self._home, self._described.limits, self._described.control_hz)
        if problem:
            raise Refusal("outside_limits", problem)
        action = self._action(content, before, target)
        self._move(lambda: self._arm.move(target, gripper, action))
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
        self._move(lambda: self._arm.grip(opening))
        return self._state(content)

    def _move_gripper(self, content: Content) -> Content:
        position = number(content, "gripper_pos")
        if not 0 <= position <= GRIPPER_RANGE:
            raise BadMessage(f"gripper_pos should be from 0, closed, to {GRIPPER_RANGE}, open, and is {position}")
        return self._grip(content, position / GRIPPER_RANGE)

    def _joint_reset(self, content: Content) -> Content:
        self._move(self._arm.joint_reset)
        return self._after_reset(content)

    def _reset(self, content: Content) -> Content:
        task, split, number_of = text(content, "task"), text(content, "split"), whole(content, "init_state")
        (known,) = [known for known in self._described.tasks if known.name == task] or (None,)
        if known is None or not 0 <= number_of < known.init_states.get(split, 0):
            raise BadMessage(f"there is no start {number_of} of {task} in {split}")
        self._move(lambda: self._arm.reset(task, split, number_of))
        return self._after_reset(content)

    def _after_reset(self, content: Content) -> Content:
        self._home = self._measured().pose[3:]
        return self._state(content)

    def _clear_error(self, content: Content) -> Content:
        with self._modes:
            self._require_released()
            stops = self._stops
        self._arm.clear_error()
        with self._modes:
            if stops == self._stops:
                self._mode, self._why, self._halt_failed = "ready", "", False
        self._obey_stops_since(stops)
        return self._state(content)

    def _update_param(self, content: Content) -> Content:
        values = content.get("params")
        if not isinstance(values, dict):
            raise BadMessage("params should be an object of names and numbers")
        unknown = sorted(set(values) - set(self._described.compliance))
        if unknown:
            raise BadMessage(f"there is no compliance parameter {', '.join(unknown)}")
        numbers = {name: number(values, name) for name in values}
        self._move(lambda: self._arm.update_param(numbers))
        return self._state(content)

    def _scene(self, content: Content) -> Content:
        return {"scene": scene_content(self._arm.scene())}

    def _state(self, content: Content) -> Content:
        self._check_cameras(content)
        state = self._measured(content.get("cameras", []))
        problem = "" if state.unstable else state_problem(state, self._described.limits)
        if problem and self._mode == "ready":
            self.stop(problem)
            raise Refusal("stopped", problem)
        return state_content(replace(state, mode=self._mode))

    def _check_cameras(self, content: Content) -> None:
        cameras = content.get("cameras", [])
        if not isinstance(cameras, list) or not set(map(str, cameras)) <= set(self._described.cameras):
            raise BadMessage(f"cameras should be some of {', '.join(self._described.cameras)}, and is {cameras}")

    def _measured(self, cameras: Sequence[str] = ()) -> RobotState:
        """Nothing can be compared with a number that is not finite, so the arm is stopped."""
        state = self._arm.measure(cameras)
        for name in STATE_SHAPES:
            if not np.isfinite(getattr(state, name)).all():
                raise self._failed(f"it measured a {name} that is not finite")
        return state


_NEGATED = np.array([1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0])
"""A quaternion and its negative are one orientation."""


def _code(error: BadMessage) -> str:
    return "not_finite" if "not finite" in str(error) else "bad_request"


def _refused(refusal: Refusal, seq: Any) -> Answer:
    sent = seq if isinstance(seq, int) else None
    return refusal.status, dumps({"error": refusal.code, "what": refusal.what, "seq": sent})
