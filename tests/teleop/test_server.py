"""Who may move the robot: tokens, origins, one pilot, and nothing that a page sends does harm."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed, InvalidStatus

from nightshift import config
from nightshift.access import Access, check_host
from nightshift.errors import ConfigError, DataError
from nightshift.teleop import messages
from nightshift.teleop.hub import UNSEEN_PER_VIEW, Page
from nightshift.teleop.mirror import Frame
from nightshift.teleop.pilot import LEASE_SECONDS
from tests.teleop.serving import Served, served, until, visitor

TOKEN = "0123456789abcdef0123456789abcdef"
FORWARD = (1.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@pytest.fixture
def open_server(params: config.Params) -> Iterator[Served]:
    with served(params) as found:
        yield found


@pytest.fixture
def guarded(params: config.Params) -> Iterator[Served]:
    with served(params, token=TOKEN) as found:
        yield found


def get(at: Served, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """As a browser's request, of exactly this path."""
    with closing(http.client.HTTPConnection("127.0.0.1", at.port, timeout=60)) as connection:
        connection.putrequest("GET", path, skip_host="Host" in headers, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def test_a_pilot_starts_drives_and_a_closed_tab_stops_the_robot(open_server: Served) -> None:
    rig = open_server.rig
    with visitor(open_server) as alice:
        assert alice.hear("welcome")["source"] == "shown"
        assert alice.fly("Alice")
        alice.drive(*FORWARD)
        alice.say(type="start")
        until(lambda: bool(rig.session._orders) and rig.pilot.command is not None)
        rig.tick()
        assert rig.steps == 1
    until(lambda: rig.pilot.holder is None)
    rig.tick()
    assert rig.phase == "paused" and rig.steps == 1


def test_others_watch_and_cannot_command(open_server: Served) -> None:
    with visitor(open_server) as alice, visitor(open_server) as bob:
        assert alice.fly("Alice")
        assert not bob.fly("Bob")
        assert bob.hear("notice")["text"] == "Alice has the controls"
        for order in ({"type": "start"}, {"type": "undo"}, {"type": "mark", "success": True}):
            bob.say(**order)
            assert "you are watching" in bob.hear("notice")["text"]
        bob.drive(*FORWARD)
        assert "you are watching" in bob.hear("notice")["text"]
        assert open_server.rig.pilot.command is None and not open_server.rig.session._orders
        open_server.rig.tick()
        until(lambda: bob.hear("state")["pilot"] == "Alice")
        alice.say(type="release")
        assert not alice.hear("controls")["granted"]
        assert bob.fly("Bob")


def test_a_pilot_whose_lease_went_to_another_is_told(open_server: Served) -> None:
    with visitor(open_server) as alice, visitor(open_server) as bob:
        assert alice.fly("Alice")
        open_server.rig.clock.now += LEASE_SECONDS + 1
        assert bob.fly("Bob")
        assert not alice.hear("controls")["granted"]
        assert alice.hear("notice")["text"] == "you were silent, and Bob has taken the controls"


def test_a_wrong_token_is_refused(guarded: Served) -> None:
    for token in ("", "wrong", TOKEN[:-1], TOKEN + "0", "é"):
        with pytest.raises(ConnectionClosed), visitor(guarded, token=token) as stranger:
            stranger.hear("welcome")


def test_the_right_token_is_admitted_and_a_first_message_that_is_no_hello_is_not(guarded: Served) -> None:
    with visitor(guarded, token=TOKEN) as known:
        assert known.hear("welcome")
    from websockets.sync.client import connect

    with connect(f"ws://127.0.0.1:{guarded.port}/socket") as socket:
        socket.send(json.dumps({"type": "pilot", "who": "Mallory"}))
        with pytest.raises(ConnectionClosed):
            socket.recv(timeout=60)


def test_pictures_of_episodes_need_the_token_in_a_header(guarded: Served) -> None:
    guarded.rig.demonstrate()
    assert get(guarded, "/episodes/0/film")[0] == 401
    assert get(guarded, f"/episodes/0/film?token={TOKEN}")[0] == 401, "a URL is logged"
    status, headers, content = get(guarded, "/episodes/0/thumbnail", Authorization=f"Bearer {TOKEN}")
    assert status == 200 and headers["content-type"] == "image/jpeg" and content[:2] == b"\xff\xd8"


def test_a_page_of_another_site_cannot_open_the_socket(open_server: Served) -> None:
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1", "https://localhost", "http://["):
        with pytest.raises(InvalidStatus, match="403"), visitor(open_server, origin=origin):
            pass


def test_our_own_page_may_open_the_socket_and_a_name_that_was_pointed_here_may_not(open_server: Served) -> None:
    with visitor(open_server, origin=f"http://127.0.0.1:{open_server.port}") as ours:
        assert ours.hear("welcome")
    assert get(open_server, "/", Host="evil.example")[0] == 403
    assert get(open_server, "/", Host=f"localhost:{open_server.port}")[0] == 200
    assert get(open_server, "/", Host="[::1]:9999")[0] == 200, "through a tunnel with another port"
    assert get(open_server, "/", Host="127.0.0.1.evil.example")[0] == 403
    assert get(open_server, "/", Host="[")[0] in (400, 403)


def test_the_page_may_load_nothing_from_elsewhere_and_be_framed_by_nobody(open_server: Served) -> None:
    status, headers, content = get(open_server, "/")
    assert status == 200 and b"<title>Nightshift teleop</title>" in content
    assert "default-src 'self'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store"


PATHS = [
    "/../params.yaml",
    "/..%2f..%2fparams.yaml",
    "/teleop.js/../../session.py",
    "/static/../session.py",
    "/episodes/../../params.yaml/film",
    "/episodes/..%2f..%2fparams.yaml/film",
    "/episodes/0%00/film",
    "/episodes/-1/film",
    "/episodes/1e3/film",
    "/episodes/99999999999999999999/film",
    "/episodes/0/film/../../../params.yaml",
    "//etc/passwd",
    "/docs",
    "/openapi.json",
]


def test_no_request_reaches_a_file(open_server: Served) -> None:
    for path in PATHS:
        assert get(open_server, path)[0] in (400, 404, 422), path


MALFORMED = [
    "",
    "{",
    "null",
    "[]",
    '"drive"',
    "{}",
    '{"type": "shell", "command": "rm"}',
    '{"type": "start", "file": "/etc/passwd"}',
    '{"type": "drive"}',
    '{"type": "drive", "seq": 1, "axes": [NaN, 0, 0, 0, 0, 0], "gripper": "open", "speed": 1.0}',
    '{"type": "drive", "seq": 1, "axes": [1e999, 0, 0, 0, 0, 0], "gripper": "open", "speed": 1.0}',
    '{"type": "drive", "seq": 1, "axes": [2, 0, 0, 0, 0, 0], "gripper": "open", "speed": 1.0}',
    '{"type": "drive", "seq": 1, "axes": [0, 0, 0, 0, 0, 0], "gripper": "ajar", "speed": 1.0}',
    '{"type": "drive", "seq": 1, "axes": [0, 0, 0, 0, 0, 0], "gripper": "open", "speed": 0}',
    '{"type": "drive", "seq": -1, "axes": [0, 0, 0, 0, 0, 0], "gripper": "open", "speed": 1.0}',
    '{"type": "drive", "seq": 1, "axes": "000000", "gripper": "open", "speed": 1.0}',
    '{"type": "mark", "success": "yes"}',
    '{"type": "reset", "task": "near", "init_state": 1.5}',
    '{"type": "reset", "task": "near", "init_state": "0"}',
    '{"type": "pilot", "who": ""}',
    '{"type": "pilot", "who": "a\\nb"}',
    json.dumps({"type": "pilot", "who": "x" * 65}),
    "[" * 3000,
]


@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_message_is_refused_with_a_reason(text: str) -> None:
    with pytest.raises(DataError, match=r"."):
        messages.parse(text)


@settings(max_examples=40)
@given(st.text(max_size=30) | st.dictionaries(st.just("type"), st.sampled_from(["drive", "mark", ""])).map(json.dumps))
def test_whatever_a_page_sends_is_a_message_or_refused(text: str) -> None:
    try:
        messages.parse(text)
    except DataError as error:
        assert error.what


def test_malformed_messages_do_not_cost_the_pilot_the_controls(open_server: Served) -> None:
    with visitor(open_server) as alice:
        assert alice.fly("Alice")
        for text in MALFORMED:
            alice.say_raw(text)
            assert "not understood" in alice.hear("notice")["text"]
        alice.drive(1.0, 0.0)
        assert alice.hear("notice")["text"] == "a command has 6 axes"
        alice.drive(*FORWARD)
        until(lambda: open_server.rig.pilot.command is not None)


def test_a_message_that_is_too_long_or_no_text_ends_the_connection(open_server: Served) -> None:
    for content in ("x" * (messages.LARGEST + 1), b"\x00\x01"):
        with visitor(open_server) as alice:
            assert alice.fly("Alice")
            alice.say_raw(content)
            with pytest.raises(ConnectionClosed):
                alice.hear("nothing")
        until(lambda: open_server.rig.pilot.holder is None)


def test_other_machines_need_a_token() -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        check_host(host, None)
    for host in ("0.0.0.0", "::", "192.168.1.5", "robot.local"):
        with pytest.raises(ConfigError, match="there is no token"):
            check_host(host, None)
        check_host(host, TOKEN)
    assert Access(TOKEN).admits_header(f"Bearer {TOKEN}") and not Access(TOKEN).admits_header("")


def test_a_slow_page_gets_fewer_pictures_and_never_old_ones() -> None:
    asyncio.run(_show_to_a_slow_page())


async def _show_to_a_slow_page() -> None:
    page = Page(0, ["scene"])
    for step in range(100):
        page.show(Frame(view="scene", step=step, time=0.0, jpeg=b""))
    first = await page.next()
    assert isinstance(first, bytes) and int.from_bytes(first[4:8], "little") == 99
    for step in range(100, 103):
        page.show(Frame(view="scene", step=step, time=0.0, jpeg=b""))
        page.tell(f"state {step}", is_state=True)
    assert await page.next() == "state 102", "of states the newest, and before pictures"
    await page.next()
    page.show(Frame(view="scene", step=103, time=0.0, jpeg=b""))
    assert page._unseen == UNSEEN_PER_VIEW
    page.tell("notice")
    assert await page.next() == "notice"
    page.seen()
    last = await page.next()
    assert isinstance(last, bytes) and int.from_bytes(last[4:8], "little") == 103
