"""What `nightshift robot check` tries on a server: each check sends something and knows what has to come back."""

from __future__ import annotations

import http.client
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from nightshift.envs.robot.messages import (
    EXTENSIONS,
    GRIPPER_RANGE,
    BadMessage,
    Description,
    Limits,
    loads,
    scene_of,
    state_of,
)
from nightshift.envs.robot.poses import Vector, angle_between, multiply, quaternion_of, turned_at_most
from nightshift.robot_server.probe import Probe, Surprise, shown

Try = Callable[[Probe, Description], None]
_MOVE_M = 0.02
_OUTSIDE_M = 0.01
_OUTSIDE_RAD = 0.02
_FASTER = 1.2
"""Times the speed limit: refused, and little more than what is allowed if it is not."""
_LARGEST_TURN = 1.0
"""Radians by which the hand is turned for a check; an arm with a wider limit is not twisted up to it."""
_FRESH_S = 0.5
"""Seconds by which an image may be older than its state."""
_TRIES = 60
"""Control steps in which a small movement has to be half done."""

_UNDER_WAY_S = 0.3
"""Seconds after which an arm that was sent to its rest joints moves."""
_AT_ONCE_S = 1.0
"""Seconds within which a movement has ended after a stop; one to the rest joints takes longer."""
_UNREADABLE = (b"{this is no JSON", b"[]", b'{"reason": NaN}')


@dataclass(frozen=True)
class Check:
    name: str
    about: str
    """What the protocol asks for."""
    attempt: Try
    reads_only: bool = False
    """Sends nothing that could move any server: no session, no command. A wrong server may execute all the others."""


@dataclass(frozen=True, kw_only=True)
class Result:
    name: str
    about: str
    passed: bool
    sent: str = ""
    expected: str = ""
    came: str = ""


def run_checks(probe: Probe, checks: Sequence[Check]) -> Iterator[Result]:
    """/describe first; then each check, on a new session if it commands the robot."""
    try:
        described = probe.describe()
    except (BadMessage, OSError, http.client.HTTPException) as error:
        yield _failed(DESCRIBE, Surprise("/describe", "a description as in docs/robot_protocol.md", str(error)))
        return
    yield Result(name=DESCRIBE.name, about=DESCRIBE.about, passed=True)
    for check in checks:
        yield _tried(check, probe, described)
    try:
        probe.end()
    except (BadMessage, OSError, http.client.HTTPException):
        probe.session = ""


def _tried(check: Check, probe: Probe, described: Description) -> Result:
    try:
        if not check.reads_only:
            probe.begin()
        check.attempt(probe, described)
    except Surprise as surprise:
        return _failed(check, surprise)
    except (BadMessage, OSError, http.client.HTTPException) as error:
        return _failed(check, Surprise("the request", "an answer that can be read", str(error) or repr(error)))
    except (KeyError, TypeError) as error:
        return _failed(check, Surprise("the request", "an answer with every field", f"one without {error}"))
    return Result(name=check.name, about=check.about, passed=True)


def _failed(check: Check, found: Surprise) -> Result:
    return Result(
        name=check.name, about=check.about, passed=False, sent=found.sent, expected=found.expected, came=found.came
    )


def _require(ok: bool, sent: str, expected: str, came: object) -> None:
    if not ok:
        raise Surprise(sent, expected, str(came))


def _no_json(probe: Probe, _: Description) -> None:
    status, data = probe.post("getstate", b"{this is no JSON")
    probe.expect_refusal("bad_request", "/getstate with a body that is no JSON", status, loads(data))


def _unknown_endpoint(probe: Probe, _: Description) -> None:
    status, answer = probe.ask("fly")
    probe.expect_refusal("unknown", "/fly", status, answer)


def _token(probe: Probe, _: Description) -> None:
    if not probe.has_token:
        return
    for sent, authorization in (("no token", ""), ("a wrong token", f"Bearer {secrets.token_hex()}")):
        for endpoint in ("describe", "getstate", "stop"):
            status, data = probe.post(endpoint, b"{}", {"Authorization": authorization})
            probe.expect_refusal("unauthorized", f"/{endpoint} with {sent}", status, loads(data))


def _one_session(probe: Probe, _: Description) -> None:
    status, answer = probe.ask("open", client="another")
    probe.expect_refusal("busy", "/open while another session is ready", status, answer)


def _other_session(probe: Probe, described: Description) -> None:
    still = probe.hold_still(described)
    seq = probe.seq + 1
    status, answer = probe.ask("pose", **still, session="not-yours", seq=seq)
    probe.expect_refusal("no_session", "/pose with another session", status, answer, seq)


def _begins_held(probe: Probe, described: Description) -> None:
    probe.end()
    status, answer = probe.ask("open", client="nightshift robot check")
    _require(status == http.client.OK, "/open after /close", "status 200", f"status {status}: {shown(answer)}")
    probe.session, probe.seq = answer["session"], 0
    probe.refused("held", "pose", **probe.hold_still(described))


def _echo(probe: Probe, described: Description) -> None:
    still = probe.hold_still(described)
    probe.done("pose", **still)
    probe.refused("bad_request", "pose", **{**still, "arr": still["arr"][:6]})


def _state(probe: Probe, described: Description) -> None:
    length = float(np.linalg.norm(probe.look(described).pose[3:]))
    _require(abs(length - 1) < 1e-3, "/getstate", "a quaternion of length 1 in pose", length)  # noqa: PLR2004


def _clock(probe: Probe, described: Description) -> None:
    times = [probe.look(described).time for _ in range(3)]
    _require(times[0] < times[1] < times[2], "/getstate three times", "times that go forward", times)


def _repeat(probe: Probe, described: Description) -> None:
    first = probe.done("pose", **probe.hold_still(described))
    _, again = probe.post("pose", probe.last_body)
    _require(loads(again) == first, "/pose twice with one seq", "the first answer again", shown(loads(again)))


def _seq_conflict(probe: Probe, described: Description) -> None:
    still = probe.hold_still(described)
    probe.done("pose", **still)
    status, answer = probe.ask("open_gripper", session=probe.session, seq=probe.seq)
    probe.expect_refusal("seq_conflict", "/open_gripper with the seq of a /pose", status, answer, probe.seq)


def _old_seq(probe: Probe, described: Description) -> None:
    still = probe.hold_still(described)
    probe.done("pose", **still)
    seq = probe.seq - 1
    status, answer = probe.ask("pose", **still, session=probe.session, seq=seq)
    probe.expect_refusal("old_seq", "/pose with a seq below the last", status, answer, seq)


def _not_finite(probe: Probe, described: Description) -> None:
    for bad in (float("nan"), float("inf")):
        still = probe.hold_still(described)
        probe.refused("not_finite", "pose", **{**still, "arr": [bad, *still["arr"][1:]]})


def _shape(probe: Probe, described: Description) -> None:
    still = probe.hold_still(described)
    probe.refused("bad_request", "pose", **{**still, "arr": still["arr"][:6]})


def _box(probe: Probe, described: Description) -> None:
    still = probe.hold_still(described)
    probe.refused("outside_limits", "pose", **{**still, "arr": _just_outside(still["arr"], described.limits)})


def _just_outside(pose: list[float], limits: Limits) -> list[float]:
    """Beyond the nearest face of the box: a server that does not refuse it goes no farther than it has to."""
    below = [(pose[axis] - low, axis, low - _OUTSIDE_M) for axis, low in enumerate(limits.box_low)]
    above = [(high - pose[axis], axis, high + _OUTSIDE_M) for axis, high in enumerate(limits.box_high)]
    _, axis, place = min(below + above)
    return [*pose[:axis], place, *pose[axis + 1 :]]


def _speed(probe: Probe, described: Description) -> None:
    still = probe.hold_still(described)
    limits = described.limits
    far = _FASTER * limits.linear_speed / described.control_hz
    inside = still["arr"][2] + far <= limits.box_high[2]
    target = [*still["arr"][:2], still["arr"][2] + (far if inside else -far), *still["arr"][3:]]
    probe.refused("outside_limits", "pose", **{**still, "arr": target})


def _turn_speed(probe: Probe, described: Description) -> None:
    """In both directions: one of them may exceed max_turn, too."""
    reach = described.limits.angular_speed / described.control_hz
    if reach >= np.pi:
        return  # no orientation is farther away
    for angle in (_FASTER * reach, -_FASTER * reach):
        still = probe.hold_still(described)
        orientation = _about_z(np.clip(angle, -np.pi, np.pi), np.array(still["arr"][3:]))
        probe.refused("outside_limits", "pose", **{**still, "arr": [*still["arr"][:3], *orientation.tolist()]})


def _max_turn(probe: Probe, described: Description) -> None:
    """From close to the limit: from farther away the target would exceed the speed limit, too."""
    limits = described.limits
    if limits.max_turn > _LARGEST_TURN:
        return
    reach = limits.angular_speed / described.control_hz
    home = state_of(probe.done("jointreset"), described, ()).pose[3:]
    beyond = _about_z(limits.max_turn + min(_OUTSIDE_RAD, reach / 4), home)
    _turn(probe, described, _about_z(max(limits.max_turn - reach / 4, 0.0), home))
    still = probe.hold_still(described)
    if angle_between(beyond, np.array(still["arr"][3:])) <= reach:  # not so where a hand cannot turn
        probe.refused("outside_limits", "pose", **{**still, "arr": [*still["arr"][:3], *beyond.tolist()]})


def _turn(probe: Probe, described: Description, goal: Vector) -> None:
    """Towards an orientation, at half the speed limit, until the hand is almost there or does not get there."""
    limits = described.limits
    step = limits.angular_speed / described.control_hz / 2
    for _ in range(_TRIES + round(2 * limits.max_turn / step)):
        now = probe.state(described)
        if angle_between(goal, now.pose[3:]) <= step / 2:
            return
        target = [*now.pose[:3].tolist(), *turned_at_most(now.pose[3:], goal, step).tolist()]
        probe.done("pose", arr=target, based_on=now.time)
        if described.realtime:
            probe.sleep(1 / described.control_hz)


def _about_z(angle: float, orientation: Vector) -> Vector:
    return multiply(quaternion_of(np.array([0.0, 0.0, angle])), orientation)


def _stale(probe: Probe, described: Description) -> None:
    still = probe.hold_still(described)
    probe.refused("stale", "pose", **{**still, "based_on": still["based_on"] - described.command_age_s - 1})


def _mismatch(probe: Probe, described: Description) -> None:
    if "action" in described.capabilities:
        action = [1.0, *[0.0] * (described.action_size - 1)]
        probe.refused("bad_request", "pose", **probe.hold_still(described, action=action))


def _gripper_range(probe: Probe, described: Description) -> None:
    probe.refused("bad_request", "pose", **probe.hold_still(described, gripper=2.0))


def _extensions(probe: Probe, described: Description) -> None:
    """Each is asked for as a server that has it would have to accept it."""
    start = {"task": described.tasks[0].name, "split": "train", "init_state": 0}
    contents: dict[str, dict[str, Any]] = {
        "move_gripper": {"gripper_pos": GRIPPER_RANGE / 2},
        "update_param": {"params": {}},
        "reset": start,
    }
    for endpoint, capability in EXTENSIONS.items():
        if capability not in described.capabilities:
            probe.refused("unknown", endpoint, **contents.get(endpoint, {}))
    if "action" not in described.capabilities:
        still = probe.hold_still(described, action=[0.0] * described.action_size)
        probe.refused("unknown", "pose", **still)


def _compliance(probe: Probe, described: Description) -> None:
    if "update_param" in described.capabilities:
        probe.refused("bad_request", "update_param", params={"no_such_parameter": 1.0})
        probe.refused("bad_request", "update_param", params={described.compliance[0]: "stiff"})
        probe.refused("bad_request", "update_param", params=[1.0])
        probe.refused("not_finite", "update_param", params={described.compliance[0]: float("nan")})
        probe.done("update_param", params={})  # changes nothing: the present numbers are not known


def _scene(probe: Probe, described: Description) -> None:
    if "scene" in described.capabilities:
        answer = probe.done("scene")
        try:
            scene_of(answer["scene"])
        except BadMessage as error:
            raise Surprise("/scene", "a Scene of nightshift/types.py", str(error)) from error


def _pictures(probe: Probe, described: Description) -> None:
    for camera in described.cameras:
        newest = -np.inf
        for _ in range(2):
            state = probe.look(described, camera)
            taken = state.images[camera].time
            age = state.time - taken
            _require(age <= _FRESH_S, f"/getstate with {camera}", f"an image at most {_FRESH_S} s old", f"{age:.3f} s")
            _require(taken > newest, f"/getstate with {camera} again", "a newer image", "the time of the one before")
            newest = taken


def _stop(probe: Probe, described: Description) -> None:
    status, answer = probe.ask("stop", reason="nightshift robot check")
    _require(status == http.client.OK, "/stop without a session", "status 200", f"status {status}: {shown(answer)}")
    mode = probe.look(described).mode
    _require(mode == "stopped", "/getstate after /stop", "the mode stopped", mode)


def _stays_stopped(probe: Probe, described: Description) -> None:
    still = probe.hold_still(described)
    _stop(probe, described)
    probe.refused("stopped", "pose", **still)
    probe.done("clearerr")
    probe.done("pose", **probe.hold_still(described))


def _latched(probe: Probe, _: Description) -> None:
    probe.ask("stop", reason="nightshift robot check", latched=True)
    try:
        probe.refused("latched", "clearerr")
    finally:
        probe.ask("release")
    probe.done("clearerr")


def _unreadable_stop(probe: Probe, described: Description) -> None:
    for body in _UNREADABLE:
        probe.done("clearerr")
        probe.post("stop", body)
        mode = probe.look(described).mode
        _require(mode == "stopped", f"/stop with the body {body.decode()}", "the mode stopped", mode)


def _stop_in_motion(probe: Probe, described: Description) -> None:
    """Nothing more is asked of a movement that ended before the stop came, as in a simulator."""
    with ThreadPoolExecutor(1) as other:
        moving = other.submit(probe.command, "jointreset")
        probe.sleep(_UNDER_WAY_S)
        began, is_under_way = probe.now(), not moving.done()
        stopping, answer = probe.ask("stop", reason="nightshift robot check")
        status, moved = moving.result()
    sent = "/stop during /jointreset"
    _require(stopping == http.client.OK, sent, "status 200", f"status {stopping}: {shown(answer)}")
    if status != http.client.OK:
        probe.expect_refusal("stopped", f"/jointreset, {sent}", status, moved, probe.seq)
    waited_s = probe.now() - began
    is_late = is_under_way and status == http.client.OK and waited_s > _AT_ONCE_S
    _require(not is_late, sent, "an end of the movement at once", f"the movement was done, {waited_s:.1f} s later")
    mode = probe.look(described).mode
    _require(mode == "stopped", f"/getstate after {sent}", "the mode stopped", mode)


def _watchdog(probe: Probe, described: Description) -> None:
    still = probe.hold_still(described)
    probe.done("pose", **still)
    probe.sleep(1.5 * described.watchdog_s)
    mode = probe.state(described).mode
    _require(mode == "held", f"nothing for {1.5 * described.watchdog_s:g} s, then /getstate", "the mode held", mode)
    probe.refused("held", "pose", **probe.hold_still(described))


def _reading_is_no_command(probe: Probe, described: Description) -> None:
    """Someone who only looks does not keep the robot ready."""
    for _ in range(4):
        probe.sleep(0.4 * described.watchdog_s)
        mode = probe.state(described).mode
    _require(mode == "held", "nothing but /getstate for longer than watchdog_s", "the mode held", mode)


def _silent_session(probe: Probe, described: Description) -> None:
    probe.sleep(1.5 * described.watchdog_s)
    status, answer = probe.ask("open", client="another")
    expected = "status 200: a silent session may be taken over"
    _require(status == http.client.OK, "/open after silence", expected, f"status {status}: {shown(answer)}")
    old, probe.session = probe.session, str(answer["session"])
    seq, probe.seq = probe.seq + 1, 0
    status, answer = probe.ask("clearerr", session=old, seq=seq)
    probe.expect_refusal("no_session", "/clearerr with the old session", status, answer, seq)


def _moves(probe: Probe, described: Description) -> None:
    start = probe.state(described)
    up = start.pose[2] + _MOVE_M <= described.limits.box_high[2]
    goal = start.pose + np.array([0.0, 0.0, _MOVE_M if up else -_MOVE_M, *[0.0] * 4])
    reach = described.limits.linear_speed / described.control_hz
    for _ in range(_TRIES):
        now = probe.state(described)
        left = goal[:3] - now.pose[:3]
        if np.linalg.norm(left) <= _MOVE_M / 2:
            return
        step = left * min(1.0, reach / float(np.linalg.norm(left)))
        target = np.concatenate([now.pose[:3] + step, now.pose[3:]])
        probe.done("pose", arr=target.tolist(), based_on=now.time)
        if described.realtime:
            probe.sleep(1 / described.control_hz)
    raise Surprise(f"/pose {_MOVE_M} m away, {_TRIES} times", "the hand half-way there", f"still {left} away")


def _moves_once(probe: Probe, described: Description) -> None:
    now = probe.state(described)
    reach = min(_MOVE_M, described.limits.linear_speed / described.control_hz)
    target = now.pose + np.array([0.0, 0.0, reach, *[0.0] * 4])
    if target[2] > described.limits.box_high[2]:
        target[2] = now.pose[2] - reach
    first = state_of(probe.done("pose", arr=target.tolist(), based_on=now.time), described, ())
    probe.post("pose", probe.last_body)
    after = probe.state(described)
    if not described.realtime:  # time stands still: only a second execution can have moved it
        same = np.array_equal(first.pose, after.pose)
        _require(same, "/pose twice with one seq", "one movement", f"{after.pose} after {first.pose}")


def _joint_reset(probe: Probe, described: Description) -> None:
    mode = state_of(probe.done("jointreset"), described, ()).mode
    _require(mode == "ready", "/jointreset", "the mode ready", mode)


def _gripper(probe: Probe, described: Description) -> None:
    opened = _after_gripper(probe, described, "open_gripper")
    closed = _after_gripper(probe, described, "close_gripper")
    _require(
        closed < opened,
        "/open_gripper, then /close_gripper",
        "a smaller gripper_pos",
        f"{closed:.3f} after {opened:.3f}",
    )


def _after_gripper(probe: Probe, described: Description, endpoint: str, **content: Any) -> float:
    probe.done(endpoint, **content)
    for _ in range(20):
        probe.done("pose", **probe.hold_still(described))
        if described.realtime:
            probe.sleep(1 / described.control_hz)
    return probe.state(described).gripper_pos


def _move_gripper(probe: Probe, described: Description) -> None:
    if "move_gripper" not in described.capabilities:
        return
    for outside in (-1.0, GRIPPER_RANGE + 1.0):
        probe.refused("bad_request", "move_gripper", gripper_pos=outside)
    opened = _after_gripper(probe, described, "move_gripper", gripper_pos=GRIPPER_RANGE)
    closed = _after_gripper(probe, described, "move_gripper", gripper_pos=0)
    sent = f"/move_gripper to {GRIPPER_RANGE}, then to 0"
    _require(closed < opened, sent, "a smaller gripper_pos", f"{closed:.3f} after {opened:.3f}")


def _same_start(probe: Probe, described: Description) -> None:
    if "init_states" not in described.capabilities:
        return
    start = {"task": described.tasks[0].name, "split": "train", "init_state": 0}
    seen = []
    for _ in range(2):
        first = probe.done("reset", **start)
        after = probe.done("pose", **probe.hold_still(described))
        seen.append([{name: part[name] for name in ("pose", "q", "observations")} for part in (first, after)])
    _require(seen[0] == seen[1], "/reset to one start twice, and a step", "the same numbers", "other numbers")


def _no_such_start(probe: Probe, described: Description) -> None:
    if "init_states" in described.capabilities:
        task = described.tasks[0]
        start = {"task": task.name, "split": "train", "init_state": task.init_states["train"]}
        probe.refused("bad_request", "reset", **start)


DESCRIBE = Check("describe", "/describe says what the server is", lambda probe, _: None)
CHECKS = (
    Check("no_json", "a body that is no JSON is refused", _no_json, reads_only=True),
    Check("unknown_endpoint", "an endpoint that is not there is refused", _unknown_endpoint, reads_only=True),
    Check("token", "without the token, or with a wrong one, every request is refused", _token, reads_only=True),
    Check("state", "a state is complete and finite", _state, reads_only=True),
    Check("clock", "the time of states goes forward", _clock, reads_only=True),
    Check("pictures", "images are fresh and new", _pictures, reads_only=True),
    Check("stop", "/stop works for everyone, without a session", _stop, reads_only=True),
    Check("one_session", "one session commands, others are refused", _one_session),
    Check("other_session", "a command of another session is refused", _other_session),
    Check("begins_held", "nothing moves before /clearerr of the session", _begins_held),
    Check("echo", "an answer has the seq of its request, a refusal too", _echo),
    Check("repeat", "a repeated command gets the first answer", _repeat),
    Check("seq_conflict", "a seq is not used for two commands", _seq_conflict),
    Check("old_seq", "a seq never goes back", _old_seq),
    Check("not_finite", "NaN and infinity are refused", _not_finite),
    Check("shape", "a target of another size is refused", _shape),
    Check("box", "a target outside the safety box is refused", _box),
    Check("speed", "a target beyond the speed limit is refused", _speed),
    Check("turn_speed", "a target beyond the angular speed limit is refused", _turn_speed),
    Check("stale", "a command decided on an old state is refused", _stale),
    Check("mismatch", "an action that stands for another target is refused", _mismatch),
    Check("gripper_range", "a gripper target outside 0 to 1 is refused", _gripper_range),
    Check("extensions", "an extension that is not announced is refused", _extensions),
    Check("compliance", "an unknown compliance parameter or no number is refused, an empty object is not", _compliance),
    Check("scene", "/scene has all that a scripted expert reads", _scene),
    Check("stays_stopped", "a robot that was stopped does nothing until /clearerr", _stays_stopped),
    Check("latched", "a stop by a person lasts until /release", _latched),
    Check("unreadable_stop", "a /stop whose body cannot be read stops the robot, too", _unreadable_stop),
    Check("watchdog", "without commands the robot is held", _watchdog),
    Check("reading", "reading states does not keep the robot ready", _reading_is_no_command),
    Check("silent_session", "a silent session can be taken over, and is over then", _silent_session),
    Check("no_such_start", "a start that is not there is refused", _no_such_start),
    Check("moves", "the hand goes where it is sent", _moves),
    Check("moves_once", "a repeated command moves the hand once", _moves_once),
    Check("max_turn", "a target turned too far from the reset is refused", _max_turn),
    Check("stop_in_motion", "a stop waits for no movement, and has the last word", _stop_in_motion),
    Check("jointreset", "/jointreset ends ready", _joint_reset),
    Check("gripper", "the gripper opens and closes", _gripper),
    Check("move_gripper", "the gripper goes where it is sent, from 0 to 255", _move_gripper),
    Check("same_start", "a start is the same every time", _same_start),
)
READS_ONLY = tuple(check for check in CHECKS if check.reads_only)
