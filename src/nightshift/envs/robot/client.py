"""The client of a robot server: one session, deadlines, retries that execute nothing twice, and a stop.

Whatever cannot be trusted ends the episode: the robot is stopped, and `RobotFault` is raised. It is no
NightshiftError on purpose: the request is played again or its episode is invalid, as for a simulator that fails.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np

from nightshift import config
from nightshift.access import read_token
from nightshift.envs.robot.messages import (
    BadMessage,
    Description,
    RobotState,
    description_of,
    dumps,
    loads,
    scene_of,
    state_of,
)
from nightshift.envs.robot.safety import state_problem, wider_than
from nightshift.envs.robot.settings import limits_in
from nightshift.errors import ConfigError, SimulatorError
from nightshift.types import Scene

TOKEN_VARIABLE = "NIGHTSHIFT_ROBOT_TOKEN"
"""The environment variable with the server's token: secrets are not in params.yaml."""
_LARGEST = 1 << 26
"""Bytes of an answer; more is refused."""
_SHORTEST_S = 1e-3
"""A socket takes 0 s for no waiting at all."""
_STOP_TIMEOUT_S = 1.0
_BUSY_POLL_S = 0.1


class RobotFault(RuntimeError):
    """The robot or its server did something that cannot be trusted."""

    is_stopped = False
    """Whether the server has confirmed a stop; if not, its watchdog has to hold the robot."""


class RobotRefusal(RobotFault):
    """The server did not do what was asked for."""

    code = ""
    """Of the protocol."""
    said = ""


class Clock(Protocol):
    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class _Unanswered(Exception):
    """One attempt got no answer."""


class RobotClient:
    """Example:

    client = RobotClient(settings)       # env.robot of params.yaml
    client.open()
    state = client.command("clearerr")
    state = client.command("pose", arr=target.tolist(), based_on=state.time)
    client.close()
    """

    def __init__(
        self, settings: config.Robot, described: Description | None = None, clock: Clock | None = None
    ) -> None:
        """`described`: what the server says of itself, where that is known already."""
        self._settings = settings
        self._clock = clock or SystemClock()
        self._connection: http.client.HTTPConnection | None = None
        self.description = described or describe(settings)
        self._limits = limits_in(settings)
        self._session = ""
        self._stop_was_lost = False
        self._seq = 0
        self._newest = -np.inf
        self._pictures: dict[str, float] = {}

    @property
    def clock(self) -> Clock:
        return self._clock

    @property
    def is_open(self) -> bool:
        return bool(self._session)

    def open(self) -> None:
        """Begin a session, which commands the robot until it is closed or silent for too long."""
        status, content = self._ask_for_session()
        if content.get("error") in ("busy", "unauthorized"):
            raise SimulatorError(
                f"the robot at {self._settings.url} cannot be commanded: {_said(content)}",
                f"end what else uses it; a token goes into the environment variable {TOKEN_VARIABLE}",
            )
        if status != http.client.OK or not isinstance(content.get("session"), str):
            raise RobotFault(f"{self._settings.url} gives no session: {_said(content)}")
        self._session, self._seq, self._stop_was_lost = content["session"], 0, False
        self._newest = -np.inf
        self._pictures = {}

    def _ask_for_session(self) -> tuple[int, dict[str, Any]]:
        """After a stop that did not arrive the robot is ready under the lost session, until the watchdog holds it."""
        patience_s = self.description.watchdog_s + self._settings.deadline_s if self._stop_was_lost else 0.0
        deadline = self._clock.now() + patience_s
        while True:
            status, content = self._exchange("open", {"client": socket.gethostname()}, self._settings.deadline_s)
            if content.get("error") != "busy" or self._clock.now() >= deadline:
                return status, content
            self._clock.sleep(_BUSY_POLL_S)

    def command(
        self, endpoint: str, *, cameras: Sequence[str] = (), deadline_s: float | None = None, **content: Any
    ) -> RobotState:
        """Carry out a command, or read the state, and return what was measured after it.

        A command that gets no answer in time is sent again with the same sequence number, so that the server does not
        execute it twice.
        """
        within_s = deadline_s or self._settings.deadline_s
        state = self._measured(endpoint, {**content, "cameras": list(cameras)}, within_s)
        may_be_held = endpoint == "getstate"  # the next command is refused then
        if state.mode != "ready" and not (state.mode == "held" and may_be_held):
            raise self.fault(f"after {endpoint} the robot is {state.mode}")
        problem = "" if state.unstable else state_problem(state, self._limits)
        if problem:
            raise self.fault(f"after {endpoint} {problem}")
        return state

    def watch(self, cameras: Sequence[str]) -> RobotState:
        """What there is to see while nothing is commanded, also of a robot that is held or stopped."""
        return self._measured("getstate", {"cameras": list(cameras)}, self._settings.deadline_s)

    def make_ready(self) -> RobotState:
        """Clear the error, and tell the arm its compliance: a controller that failed may have begun anew without it."""
        state = self.command("clearerr")
        if not self._settings.compliance:
            return state
        try:
            return self.command("update_param", params=dict(self._settings.compliance))
        except RobotRefusal as refusal:
            if refusal.code != "bad_request":
                raise
            what = f"{self._settings.url} refuses env.robot.compliance: {refusal.said}"
            raise SimulatorError(what, "change it in params.yaml") from refusal  # the next episode would end so, too

    def scene(self) -> Scene:
        if "scene" not in self.description.capabilities:
            raise SimulatorError(
                "a robot does not know where everything is, so the scripted expert cannot play on it",
                "import demos (nightshift import) and name them in dataset.sources",
            )
        try:
            return scene_of(self._ask("scene", {}, self._settings.deadline_s).get("scene", {}))
        except BadMessage as error:
            raise self.fault(f"scene was answered with what is no scene: {error}") from error

    def stop(self, reason: str) -> bool:
        """Tell the server to stop the robot, over a new connection; whether it has. If not, its watchdog holds it."""
        self._disconnect()
        return self.halt(reason)

    def halt(self, reason: str) -> bool:
        """`stop` from any thread, also while another one waits for the answer to a command. The session goes on."""
        return halt(self._settings.url, reason)

    def fault(self, what: str) -> RobotFault:
        """Stop the robot; the error to raise."""
        error = RobotFault(what)
        self._stop_for(error)
        return error

    def _refusal(self, endpoint: str, reply: Mapping[str, Any]) -> RobotRefusal:
        """Stop the robot; the error to raise."""
        error = RobotRefusal(f"{endpoint} was refused: {_said(reply)}")
        error.code, error.said = str(reply.get("error", "")), _said(reply)
        self._stop_for(error)
        return error

    def _stop_for(self, error: RobotFault) -> None:
        error.is_stopped = self.stop(str(error))
        self._stop_was_lost = not error.is_stopped or self._stop_was_lost
        self._session = ""

    def close(self) -> None:
        """End the session, after which the server holds the robot."""
        if self._session:
            with contextlib.suppress(_Unanswered, BadMessage):
                self._attempt("close", dumps({"session": self._session, "seq": self._seq + 1}), _STOP_TIMEOUT_S)
        self._session = ""
        self._disconnect()

    def _ask(self, endpoint: str, content: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        """The answer to a request of this session, which has to have its sequence number.

        A session that is lost and a person's stop end the run, whatever the number: both last, so no later answer can
        contradict them.
        """
        self._seq += 1
        sent = {**content, "session": self._session, "seq": self._seq}
        status, reply = self._exchange(endpoint, sent, deadline_s)
        if reply.get("error") == "no_session":  # no /stop: it would stop the robot of the one who commands it now
            self._session = ""
            raise SimulatorError(
                f"{self._settings.url} takes no more commands of this run: another client took the robot over after a "
                "silence, or its server was restarted",
                "end what else uses it, and run again",
            )
        if reply.get("error") == "latched":
            raise SimulatorError(f"the robot is stopped: {_said(reply)}", "look at it, then nightshift robot release")
        if reply.get("seq") != self._seq:
            raise self.fault(f"{endpoint} with seq {self._seq} was answered as seq {reply.get('seq')}")
        if status != http.client.OK:
            raise self._refusal(endpoint, reply)
        return reply

    def _exchange(self, endpoint: str, content: Mapping[str, Any], deadline_s: float) -> tuple[int, dict[str, Any]]:
        """Up to `attempts` times, within the deadline in all."""
        body = dumps(content)
        attempts = self._settings.attempts
        started, last = self._clock.now(), ""
        for _ in range(attempts):
            try:
                return self._attempt(endpoint, body, deadline_s / attempts)
            except _Unanswered as error:
                last = str(error)
            except BadMessage as error:
                raise self.fault(f"{endpoint} was answered with what cannot be read: {error}") from error
            if self._clock.now() - started > deadline_s:
                break
        raise self.fault(f"{endpoint} was not answered within {deadline_s:g} s: {last}")

    def _attempt(self, endpoint: str, body: bytes, timeout_s: float) -> tuple[int, dict[str, Any]]:
        """An answer that does not end before the timeout is never used: its connection is closed."""
        until = time.monotonic() + timeout_s
        try:
            if self._connection is None:
                self._connection = connect(self._settings.url, timeout_s)
                self._connection.connect()
                self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream = self._connection.sock
            stream.settimeout(max(until - time.monotonic(), _SHORTEST_S))
            self._connection.request("POST", f"/{endpoint}", body, headers())
            response = self._connection.getresponse()
            data = _read(response, stream, until)
        except (OSError, http.client.HTTPException, AttributeError) as error:
            self._disconnect()
            raise _Unanswered(repr(error)) from error
        if response.will_close:
            self._disconnect()
        return response.status, loads(data)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _measured(self, endpoint: str, content: Mapping[str, Any], deadline_s: float) -> RobotState:
        """The state that a request is answered with: new, with new pictures."""
        reply = self._ask(endpoint, content, deadline_s)
        try:
            state = state_of(reply, self.description, content["cameras"])
        except BadMessage as error:
            raise self.fault(f"{endpoint} was answered with what is no state: {error}") from error
        if state.time <= self._newest:
            raise self.fault(f"{endpoint} was answered with an old state, of {state.time} s after {self._newest} s")
        self._newest = state.time
        for name, picture in state.images.items():
            self._check_picture(name, picture.time, state.time)
        return state

    def _check_picture(self, name: str, taken: float, measured: float) -> None:
        if measured - taken > self._settings.image_age_s:
            raise self.fault(f"the image of {name} is {measured - taken:.3f} s older than the state")
        if taken <= self._pictures.get(name, -np.inf):
            raise self.fault(f"the image of {name} is the one that was sent before")
        self._pictures[name] = taken


def _read(response: http.client.HTTPResponse, stream: socket.socket, until: float) -> bytes:
    """The answer's content; TimeoutError if it has not ended by then. A socket's own timeout is for each part."""
    content = bytearray()
    while len(content) < _LARGEST:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"it had not ended after {len(content)} bytes")
        stream.settimeout(left)
        part = response.read1(_LARGEST - len(content))
        if not part:
            break
        content += part
    if response.length:
        raise http.client.IncompleteRead(bytes(content))
    response.close()  # read1 leaves it open at its end, and the connection would take no other request
    return bytes(content)


def halt(url: str, reason: str) -> bool:
    """Stop the robot of whichever session commands it; whether its server has confirmed it."""
    connection = connect(url, _STOP_TIMEOUT_S)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("POST", "/stop", dumps({"reason": reason}), headers())
        response = connection.getresponse()
        response.read(_LARGEST)
        return response.status == http.client.OK
    return False


def describe(settings: config.Robot) -> Description:
    """What the server says of itself; SimulatorError if none answers, ConfigError if params.yaml names another."""
    described = fetch_description(settings.url, settings.deadline_s)
    if described.digest != settings.description:
        raise ConfigError(
            f"env.robot.description is {settings.description}, and {settings.url} is {described.digest} "
            f"({described.name}): another robot, or its tasks, limits or versions have changed",
            f"if you want this one, set env.robot.description in params.yaml to {described.digest}",
        )
    wider = wider_than(limits_in(settings), described.limits)
    if wider:
        raise ConfigError(
            f"env.robot.limits allows more than the server at {settings.url} does: {', '.join(wider)}",
            "nightshift robot check shows the server's limits",
        )
    scale = (settings.scale.position, settings.scale.rotation)
    if described.action_scale is not None and scale != tuple(described.action_scale):
        raise ConfigError(
            f"env.robot.scale is {list(scale)}, and actions of {settings.url} have {list(described.action_scale)}",
            "set env.robot.scale in params.yaml to these numbers",
        )
    unknown = sorted(set(settings.compliance) - set(described.compliance))
    if unknown:
        raise ConfigError(
            f"env.robot.compliance has {', '.join(unknown)}, and {settings.url} has "
            f"{', '.join(described.compliance) or 'no compliance parameters'}",
            "name some of these in params.yaml, or leave env.robot.compliance out",
        )
    return described


def fetch_description(url: str, timeout_s: float) -> Description:
    connection = connect(url, timeout_s)
    try:
        connection.request("POST", "/describe", b"{}", headers())
        response = connection.getresponse()
        data = response.read(_LARGEST)
        if response.status != http.client.OK:
            raise SimulatorError(f"{url} does not describe itself: {data[:200]!r}", _CHECK)
        return description_of(loads(data))
    except (OSError, http.client.HTTPException) as error:
        raise SimulatorError(
            f"no robot server answers at {url}: {error!r}", "start it, or edit env.robot.url in params.yaml"
        ) from error
    except BadMessage as error:
        raise SimulatorError(f"{url} does not describe itself: {error}", _CHECK) from error
    finally:
        connection.close()


_CHECK = "nightshift robot check says what the server does wrong"


def connect(url: str, timeout_s: float) -> http.client.HTTPConnection:
    """Not yet connected; ConfigError if `url` is no address."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or parts.scheme not in ("http", "https"):
        raise ConfigError(f"{url!r} is no address of a robot server", "give http://HOST:PORT")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(host, port, timeout=timeout_s)


def headers() -> dict[str, str]:
    token = read_token(TOKEN_VARIABLE)
    authorization = {"Authorization": f"Bearer {token}"} if token else {}
    return {"Content-Type": "application/json", **authorization}


def _said(content: Mapping[str, Any]) -> str:
    return f"{content.get('what', content)} ({content.get('error', 'no code')})"
