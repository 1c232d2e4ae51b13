"""The real server on a free port, around a session that a test steps, and a page that is a program."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from websockets.sync.client import connect
from websockets.sync.connection import Connection

from nightshift import config
from nightshift.access import Access
from nightshift.envs.robot.people import FolderPerson
from nightshift.teleop.driver import Driver
from nightshift.teleop.hub import Hub
from nightshift.teleop.server import Server, Station, listen
from tests.teleop.parts import NAME, Rig, setup_of

_PATIENCE_SECONDS = 120


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.005)


class HasPort(Protocol):
    @property
    def port(self) -> int: ...


class Served:
    """A rig behind a web server."""

    def __init__(self, rig: Rig, port: int) -> None:
        self.rig = rig
        self.port = port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"


@contextmanager
def served(
    params: config.Params,
    *,
    token: str | None = None,
    driver: Driver | None = None,
    name: str = NAME,
    port: int = 0,
) -> Iterator[Served]:
    """`port` 0 is a free one."""
    hub = Hub()
    rig = Rig(setup_of(params, driver), listener=hub, name=name)
    station = Station(
        watched=rig.session,
        pilot=rig.pilot,
        library=rig.library,
        hub=hub,
        access=Access(token),
        person=FolderPerson() if params.env.robot else None,
    )
    server = Server(station, listen("127.0.0.1", port))
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield Served(rig, server.port)
    finally:
        server.stop()
        thread.join()
        rig.close()


class Visitor:
    """A page without a browser."""

    def __init__(self, socket: Connection) -> None:
        self._socket = socket
        self._seq = 0
        self.pictures = 0

    def say(self, **message: Any) -> None:
        self._socket.send(json.dumps(message))

    def say_raw(self, text: str | bytes) -> None:
        self._socket.send(text)

    def hear(self, kind: str) -> Mapping[str, Any]:
        """The next message of this type."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            received = self._socket.recv(timeout=deadline - time.monotonic())
            if isinstance(received, bytes):
                self.pictures += 1
                self.say(type="seen")
                continue
            message: dict[str, Any] = json.loads(received)
            if message["type"] == kind:
                return message

    def fly(self, who: str) -> bool:
        self.say(type="pilot", who=who)
        return bool(self.hear("controls")["granted"])

    def hear_until(self, kind: str, wanted: Callable[[Mapping[str, Any]], bool], meanwhile: Any = None) -> None:
        """Until a message of this type is as wanted; what `meanwhile` does with each of the others."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not wanted(message := self.hear(kind)):
            assert time.monotonic() < deadline, f"it never came about; last heard: {message}"
            if meanwhile:
                meanwhile(message)

    def drive(self, *axes: float) -> None:
        self._seq += 1
        self.say(type="drive", seq=self._seq, axes=axes, gripper="open", speed=1.0)


@contextmanager
def visitor(at: HasPort, *, token: str = "", **options: Any) -> Iterator[Visitor]:
    with connect(f"ws://127.0.0.1:{at.port}/socket", **options) as socket:
        found = Visitor(socket)
        found.say(type="hello", token=token)
        yield found
