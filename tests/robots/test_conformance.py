"""`nightshift robot check` passes the reference server, and each check catches a server that gets its point wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from nightshift.robot_server.conformance import CHECKS, DESCRIBE, READS_ONLY, Check, Result, run_checks
from nightshift.robot_server.controller import Controller
from nightshift.robot_server.probe import Probe
from nightshift.robot_server.simulated import LIMITS
from tests.robots.parts import ManualClock, faulty_server

TIGHT = replace(LIMITS, box_high=(2.0, 2.0, 3.0), linear_speed=4.0)
WATCHDOG_S = 2.0

Handle = Callable[[str, bytes], tuple[int, bytes]]
Wrong = Callable[[Controller, Handle, str, dict[str, Any], bytes], tuple[int, bytes]]


def checked(wrong: Wrong | None = None, checks: Sequence[Check] = CHECKS) -> dict[str, Result]:
    """Some checks on a real HTTP server; `wrong` answers in the place of the controller."""
    clock = ManualClock()
    with faulty_server(clock=clock, watchdog_s=WATCHDOG_S, limits=TIGHT) as server:
        controller = server.controller
        if wrong is not None:
            handle: Handle = controller.handle

            def answered(endpoint: str, body: bytes, _: str = "") -> tuple[int, bytes]:
                try:
                    content = json.loads(body)
                except ValueError:
                    content = {}
                return wrong(controller, handle, endpoint, content, body)

            controller.handle = answered  # type: ignore[method-assign, assignment]
        probe = Probe(server.url, timeout_s=60.0, sleep=clock.sleep)
        return {result.name: result for result in run_checks(probe, checks)}


def test_the_reference_server_passes_every_check() -> None:
    results = checked()
    assert [result for result in results.values() if not result.passed] == []
    assert results.keys() == {DESCRIBE.name, *(check.name for check in CHECKS)}


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


def accepting(code: str) -> Wrong:
    """A server that carries out what it has to refuse with this code, or says that it has."""

    def wrong(_: Controller, handle: Handle, endpoint: str, content: dict[str, Any], body: bytes) -> tuple[int, bytes]:
        status, answer = handle(endpoint, body)
        if json.loads(answer).get("error") != code:
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


WRONG: dict[str, Wrong] = {
    "describe": changing(("describe",), protocol=0),
    "no_json": no_json_at_all,
    "unknown_endpoint": accepting("unknown"),
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
    "speed": accepting("outside_limits"),
    "stale": accepting("stale"),
    "mismatch": accepting("bad_request"),
    "gripper_range": accepting("bad_request"),
    "compliance": accepting("bad_request"),
    "pictures": old_pictures(),
    "stop": changing(("getstate",), mode="ready"),
    "stays_stopped": accepting("stopped"),
    "latched": accepting("latched"),
    "watchdog": no_watchdog,
    "reading": reading_feeds,
    "silent_session": never_lets_go,
    "no_such_start": accepting("bad_request"),
    "moves": never_moves,
    "moves_once": executes_again,
    "jointreset": changing(("jointreset",), mode="held"),
    "gripper": renamed("close_gripper", "open_gripper"),
    "same_start": noisy_start(),
}


def test_every_check_has_a_server_that_gets_it_wrong() -> None:
    assert WRONG.keys() == {DESCRIBE.name, *(check.name for check in CHECKS)}


@pytest.mark.parametrize("name", WRONG)
def test_a_check_catches_the_server_that_gets_it_wrong_and_says_what_came(name: str) -> None:
    result = checked(WRONG[name], [check for check in CHECKS if check.name == name])[name]
    assert not result.passed
    assert result.sent and result.expected and result.came
