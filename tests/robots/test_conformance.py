"""`nightshift robot check` passes the reference server, and each check catches a server that gets its point wrong."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nightshift.envs.robot.client import TOKEN_VARIABLE
from nightshift.envs.robot.messages import EXTENSIONS, BadMessage, loads
from nightshift.robot_server.conformance import CHECKS, DESCRIBE, READS_ONLY, Check, Result, run_checks
from nightshift.robot_server.controller import Controller
from nightshift.robot_server.probe import Probe
from nightshift.robot_server.simulated import LIMITS
from tests.robots.parts import (
    PATIENT_S,
    BareArm,
    CompliantArm,
    InterruptedArm,
    ManualClock,
    TurningArm,
    WatchedArm,
    faulty_server,
)

ROOT = Path(__file__).parents[2]
TIGHT = replace(LIMITS, box_high=(2.0, 2.0, 3.0), linear_speed=4.0, angular_speed=2.0, max_turn=0.3)
WATCHDOG_S = 2.0
SLOW_S = 5.0
TOKEN = "0123456789abcdef"

Handle = Callable[[str, bytes], tuple[int, bytes]]
Wrong = Callable[[Controller, Handle, str, dict[str, Any], bytes], tuple[int, bytes]]


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)


def checked(
    wrong: Wrong | None = None, checks: Sequence[Check] = CHECKS, make_arm: Callable[..., WatchedArm] = CompliantArm
) -> dict[str, Result]:
    """Some checks on a real HTTP server; `wrong` answers in the place of the controller."""
    clock = ManualClock()
    token = os.environ.get(TOKEN_VARIABLE, "")
    with faulty_server(clock=clock, watchdog_s=WATCHDOG_S, limits=TIGHT, make_arm=make_arm, token=token) as server:
        controller = server.controller
        if wrong is not None:
            controllers_own = controller.handle

            def answered(endpoint: str, body: bytes, authorization: str = "") -> tuple[int, bytes]:
                def handle(endpoint: str, body: bytes) -> tuple[int, bytes]:
                    return controllers_own(endpoint, body, authorization)

                try:
                    content = json.loads(body)
                except ValueError:
                    content = {}
                return wrong(controller, handle, endpoint, content, body)

            controller.handle = answered  # type: ignore[method-assign]
        probe = Probe(server.url, timeout_s=60.0, sleep=clock.sleep, now=clock.now)
        return {result.name: result for result in run_checks(probe, checks)}


@pytest.mark.parametrize("make_arm", [WatchedArm, CompliantArm, TurningArm, BareArm])
def test_the_reference_server_passes_every_check_whatever_extensions_its_arm_has(
    make_arm: Callable[..., WatchedArm],
) -> None:
    results = checked(make_arm=make_arm)
    assert [result for result in results.values() if not result.passed] == []
    assert results.keys() == {DESCRIBE.name, *(check.name for check in CHECKS)}


def test_a_server_without_a_token_passes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE)
    assert [result for result in checked().values() if not result.passed] == []


READ_AND_STOP = {"describe", "getstate", "stop", "fly"}


def test_without_move_nothing_is_sent_that_could_move_a_server_that_refuses_nothing() -> None:
    sent: list[tuple[str, dict[str, Any]]] = []

    def noting(_: Controller, handle: Handle, endpoint: str, content: dict[str, Any], body: bytes) -> tuple[int, bytes]:
        sent.append((endpoint, content))
        return handle(endpoint, body)

    results = checked(noting, READS_ONLY)
    assert [result for result in results.values() if not result.passed] == []
    assert {endpoint for endpoint, _ in sent} == READ_AND_STOP
    assert not any("session" in content for _, content in sent)


def test_an_answer_without_its_fields_is_a_finding_and_no_traceback() -> None:
    def empty(_: Controller, handle: Handle, endpoint: str, __: Any, body: bytes) -> tuple[int, bytes]:
        return (200, b"{}") if endpoint in ("open", "reset") else handle(endpoint, body)

    results = checked(empty, [check for check in CHECKS if check.name in ("same_start", "silent_session")])
    assert not results["same_start"].passed
    assert not results["silent_session"].passed


def accepting(code: str, saying: str = "") -> Wrong:
    """A server that carries out what it has to refuse with this code and these words, or says that it has."""

    def wrong(_: Controller, handle: Handle, endpoint: str, content: dict[str, Any], body: bytes) -> tuple[int, bytes]:
        status, answer = handle(endpoint, body)
        content_of_answer = json.loads(answer)
        if content_of_answer.get("error") != code or saying not in content_of_answer["what"]:
            return status, answer
        return 200, json.dumps({**json.loads(handle("getstate", b"{}")[1]), "seq": content.get("seq")}).encode()

    return wrong


def changing(endpoints: tuple[str, ...], **changes: Any) -> Wrong:
    """A server whose answers of some endpoints have other contents."""

    def wrong(_: Controller, handle: Handle, endpoint: str, __: dict[str, Any], body: bytes) -> tuple[int, bytes]:
        status, answer = handle(endpoint, body)
        return (
            (status, json.dumps({**json.loads(answer), **changes}).encode())
            if endpoint in endpoints
            else (status, answer)
        )

    return wrong


def unchecked_parameters(
    _: Controller, handle: Handle, endpoint: str, content: dict[str, Any], body: bytes
) -> tuple[int, bytes]:
    """A server that takes whatever numbers come, and says that it has set them."""
    if endpoint != "update_param":
        return handle(endpoint, body)
    return 200, json.dumps({**json.loads(handle("getstate", b"{}")[1]), "seq": content.get("seq")}).encode()


def refuses_all_parameters(
    _: Controller, handle: Handle, endpoint: str, content: Any, body: bytes
) -> tuple[int, bytes]:
    """Also where nothing is wrong with them."""
    status, answer = handle(endpoint, body)
    if endpoint != "update_param" or status != 200:
        return status, answer
    return 400, json.dumps({"error": "bad_request", "what": "no", "seq": content.get("seq")}).encode()


def takes_no_parameters(_: Controller, handle: Handle, endpoint: str, content: Any, body: bytes) -> tuple[int, bytes]:
    """A server that announces update_param and has no such endpoint."""
    if endpoint != "update_param":
        return handle(endpoint, body)
    return 404, json.dumps({"error": "unknown", "what": "no such endpoint", "seq": content.get("seq")}).encode()


def renamed(old: str, new: str) -> Wrong:
    """A server that mistakes one request for another."""

    def wrong(_: Controller, handle: Handle, endpoint: str, __: dict[str, Any], body: bytes) -> tuple[int, bytes]:
        return handle(new if endpoint == old else endpoint, body)

    return wrong


def no_json_at_all(_: Controller, handle: Handle, endpoint: str, content: Any, body: bytes) -> tuple[int, bytes]:
    return handle(endpoint, body if content else b"{}")


def executes_again(controller: Controller, handle: Handle, endpoint: str, _: Any, body: bytes) -> tuple[int, bytes]:
    session = controller._session
    if session is not None and endpoint == "pose" and session.request == (endpoint, body):
        remembered, session.seq = session.answer, session.seq - 1
        handle(endpoint, body)
        return remembered
    return handle(endpoint, body)


def forgets_answers(controller: Controller, handle: Handle, endpoint: str, _: Any, body: bytes) -> tuple[int, bytes]:
    session = controller._session
    if session is not None and session.request == (endpoint, body):
        session.seq -= 1
    return handle(endpoint, body)


def old_pictures() -> Wrong:
    first: dict[str, Any] = {}

    def wrong(_: Controller, handle: Handle, endpoint: str, __: Any, body: bytes) -> tuple[int, bytes]:
        status, answer = handle(endpoint, body)
        content = json.loads(answer)
        for name in content.get("images", {}):
            content["images"][name] = first.setdefault(name, content["images"][name])
        return status, json.dumps(content).encode()

    return wrong


def no_watchdog(controller: Controller, handle: Handle, endpoint: str, _: Any, body: bytes) -> tuple[int, bytes]:
    controller._last_command = controller._clock()
    return handle(endpoint, body)


def reading_feeds(controller: Controller, handle: Handle, endpoint: str, _: Any, body: bytes) -> tuple[int, bytes]:
    answer = handle(endpoint, body)
    if endpoint == "getstate":
        controller._last_command = controller._clock()
    return answer


def never_moves(
    _: Controller, handle: Handle, endpoint: str, content: dict[str, Any], body: bytes
) -> tuple[int, bytes]:
    if endpoint == "pose" and content.get("session"):
        return handle("getstate", body)
    return handle(endpoint, body)


def never_lets_go(controller: Controller, handle: Handle, endpoint: str, _: Any, body: bytes) -> tuple[int, bytes]:
    if endpoint == "open" and controller._session is not None:
        return 409, b'{"error":"busy","what":"taken","seq":null}'
    return handle(endpoint, body)


def noisy_start() -> Wrong:
    count = iter(range(10**6))

    def wrong(_: Controller, handle: Handle, endpoint: str, __: Any, body: bytes) -> tuple[int, bytes]:
        status, answer = handle(endpoint, body)
        content = json.loads(answer)
        if endpoint == "reset" and status == 200:
            content["observations"]["objects"][0] += 1e-7 * next(count)
        return status, json.dumps(content).encode()

    return wrong


def ready_at_once(controller: Controller, handle: Handle, endpoint: str, _: Any, body: bytes) -> tuple[int, bytes]:
    answer = handle(endpoint, body)
    if endpoint == "open" and answer[0] == 200:
        controller._mode = "ready"
    return answer


def obeys_readable_stops_alone(_: Controller, handle: Handle, endpoint: str, __: Any, body: bytes) -> tuple[int, bytes]:
    try:
        loads(body)
    except BadMessage:
        if endpoint == "stop":
            return 400, b'{"error":"bad_request","what":"what?","seq":null}'
    return handle(endpoint, body)


def obeys_in_motion(controller: Controller, handle: Handle, endpoint: str, _: Any, body: bytes) -> tuple[int, bytes]:
    """A correct server, which the stop reaches while the arm moves."""
    if endpoint == "stop":
        assert isinstance(controller._arm, InterruptedArm)
        assert controller._arm.is_moving.wait(PATIENT_S)
    return handle(endpoint, body)


def ready_after_a_movement(
    controller: Controller, handle: Handle, endpoint: str, content: dict[str, Any], body: bytes
) -> tuple[int, bytes]:
    """It forgets the stop that came meanwhile."""
    answer = obeys_in_motion(controller, handle, endpoint, content, body)
    if endpoint != "jointreset":
        return answer
    controller._mode = "ready"
    return 200, json.dumps({**json.loads(handle("getstate", b"{}")[1]), "seq": content["seq"]}).encode()


def stops_after_a_movement() -> Wrong:
    """A server that does one thing after the other."""
    stop_came, has_moved = threading.Event(), threading.Event()

    def wrong(controller: Controller, handle: Handle, endpoint: str, _: Any, body: bytes) -> tuple[int, bytes]:
        if endpoint == "stop":
            stop_came.set()
            assert has_moved.wait(PATIENT_S)
        answer = handle(endpoint, body)
        if endpoint == "jointreset":
            assert stop_came.wait(PATIENT_S)
            assert isinstance(controller._clock, ManualClock)
            controller._clock.sleep(SLOW_S)
            has_moved.set()
        return answer

    return wrong


WRONG: dict[str, Wrong] = {
    "describe": changing(("describe",), protocol=0),
    "no_json": no_json_at_all,
    "unknown_endpoint": accepting("unknown"),
    "token": accepting("unauthorized"),
    "one_session": accepting("busy"),
    "other_session": accepting("no_session"),
    "begins_held": ready_at_once,
    "echo": changing(("getstate",), seq=0),
    "state": changing(("getstate",), pose=[0.0] * 6),
    "clock": changing(("getstate",), time=1000.5),
    "repeat": forgets_answers,
    "seq_conflict": accepting("seq_conflict"),
    "old_seq": accepting("old_seq"),
    "not_finite": accepting("not_finite"),
    "shape": accepting("bad_request"),
    "box": accepting("outside_limits"),
    "speed": accepting("outside_limits", "m/s"),
    "turn_speed": accepting("outside_limits", "rad/s"),
    "max_turn": accepting("outside_limits", "rad from the reset"),
    "stale": accepting("stale"),
    "mismatch": accepting("bad_request"),
    "gripper_range": accepting("bad_request"),
    "extensions": accepting("unknown"),
    "compliance": unchecked_parameters,
    "scene": changing(("scene",), scene={"bodies": {}}),
    "pictures": old_pictures(),
    "stop": changing(("getstate",), mode="ready"),
    "stays_stopped": accepting("stopped"),
    "latched": accepting("latched"),
    "unreadable_stop": obeys_readable_stops_alone,
    "stop_in_motion": ready_after_a_movement,
    "watchdog": no_watchdog,
    "reading": reading_feeds,
    "silent_session": never_lets_go,
    "no_such_start": accepting("bad_request"),
    "moves": never_moves,
    "moves_once": executes_again,
    "jointreset": changing(("jointreset",), mode="held"),
    "gripper": renamed("close_gripper", "open_gripper"),
    "move_gripper": renamed("move_gripper", "open_gripper"),
    "same_start": noisy_start(),
}
ARMS = {"extensions": BareArm, "max_turn": TurningArm, "stop_in_motion": InterruptedArm}
"""Of checks that the others have nothing for."""
ALONE = ("token", "speed", "turn_speed", "max_turn", "unreadable_stop")
"""Checks of one thing that no other check looks at."""


def test_every_check_has_a_server_that_gets_it_wrong() -> None:
    assert WRONG.keys() == {DESCRIBE.name, *(check.name for check in CHECKS)}


@pytest.mark.parametrize("name", WRONG)
def test_a_check_catches_the_server_that_gets_it_wrong_and_says_what_came(name: str) -> None:
    result = checked(WRONG[name], only(name), ARMS.get(name, CompliantArm))[name]
    assert not result.passed
    assert result.sent and result.expected and result.came


@pytest.mark.parametrize("name", ALONE)
def test_a_server_that_gets_one_thing_wrong_fails_that_check_alone(name: str) -> None:
    results = checked(WRONG[name], make_arm=TurningArm)
    assert [result.name for result in results.values() if not result.passed] == [name]


def test_the_page_for_people_who_write_a_server_lists_every_check() -> None:
    page = (ROOT / "docs/robot_protocol.md").read_text()
    for check in CHECKS:
        assert f"\n| `{check.name}` | {check.about} | {'yes' if check.reads_only else '–'} |" in page


def test_a_stop_that_comes_while_the_arm_moves_ends_the_movement() -> None:
    assert checked(obeys_in_motion, only("stop_in_motion"), InterruptedArm)["stop_in_motion"].passed


def test_a_stop_that_waits_for_the_end_of_a_movement_is_caught() -> None:
    late = checked(stops_after_a_movement(), only("stop_in_motion"))["stop_in_motion"]
    assert (late.passed, late.sent, late.expected) == (
        False,
        "/stop during /jointreset",
        "an end of the movement at once",
    )


def only(name: str) -> list[Check]:
    return [check for check in CHECKS if check.name == name]


def test_a_server_that_announces_parameters_and_takes_none_or_passes_nan_on_is_caught() -> None:
    absent = checked(takes_no_parameters, only("compliance"))["compliance"]
    assert "bad_request" in absent.expected and "unknown" in absent.came
    lax = checked(accepting("not_finite"), only("compliance"))["compliance"]
    assert not lax.passed and "NaN" in lax.sent
    refusing = checked(refuses_all_parameters, only("compliance"))["compliance"]
    assert (refusing.sent, refusing.expected) == ("/update_param", "status 200")


def refusing_without_seq(code: str) -> Wrong:
    def wrong(_: Controller, handle: Handle, endpoint: str, __: Any, body: bytes) -> tuple[int, bytes]:
        status, answer = handle(endpoint, body)
        content = json.loads(answer)
        if content.get("error") == code:
            del content["seq"]
        return status, json.dumps(content).encode()

    return wrong


REFUSED_IN = {
    "bad_request": "echo",
    "no_session": "other_session",
    "seq_conflict": "seq_conflict",
    "old_seq": "old_seq",
    "outside_limits": "box",
    "stale": "stale",
    "held": "watchdog",
    "stopped": "stays_stopped",
    "latched": "latched",
}


@pytest.mark.parametrize("code", REFUSED_IN)
def test_a_refusal_without_the_seq_of_its_request_is_caught(code: str) -> None:
    result = checked(refusing_without_seq(code), only(REFUSED_IN[code]))[REFUSED_IN[code]]
    assert (result.passed, result.expected) == (False, "an answer with the same seq")
    assert code in result.came


@pytest.mark.parametrize(("code", "name"), [("not_finite", "not_finite"), ("unknown", "extensions")])
def test_a_refusal_of_a_body_that_was_not_read_needs_no_seq(code: str, name: str) -> None:
    assert checked(refusing_without_seq(code), only(name), BareArm)[name].passed


@pytest.mark.parametrize("endpoint", EXTENSIONS)
def test_a_server_that_has_one_extension_without_announcing_it_is_caught(endpoint: str) -> None:
    def wrong(controller: Controller, handle: Handle, asked: str, _: Any, body: bytes) -> tuple[int, bytes]:
        return accepting("unknown")(controller, handle, asked, _, body) if asked == endpoint else handle(asked, body)

    result = checked(wrong, only("extensions"), BareArm)["extensions"]
    assert not result.passed and result.sent.startswith(f"/{endpoint} ")


def test_a_description_that_has_parameters_without_the_capability_or_the_reverse_is_refused() -> None:
    unnamed: dict[str, Any] = {"compliance": []}
    unannounced: dict[str, Any] = {"capabilities": [], "action_scale": None, "observations": {}}
    for changes in (unnamed, unannounced):
        result = checked(changing(("describe",), **changes), [])[DESCRIBE.name]
        assert "compliance belongs to the capability update_param" in result.came
