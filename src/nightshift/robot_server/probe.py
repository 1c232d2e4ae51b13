"""Raw requests to a robot server, right and wrong ones, for the conformance test."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from nightshift.envs.robot.client import connect, headers
from nightshift.envs.robot.messages import Description, RobotState, description_of, loads, state_of

Content = dict[str, Any]
_RESET_TIMEOUT_S = 60.0
"""An arm takes its time to the rest joints."""
_MAY_LACK_SEQ = ("not_finite", "unknown")
"""Codes of refusals for which a server need not have read the body."""


class Surprise(Exception):
    """The server did something else than the protocol says."""

    def __init__(self, sent: str, expected: str, came: str) -> None:
        self.sent, self.expected, self.came = sent, expected, came
        super().__init__(f"{sent}: expected {expected}, came {came}")


class Probe:
    """One client of a server under test. Unlike `RobotClient` it can send what no client should."""

    def __init__(
        self,
        url: str,
        timeout_s: float,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self.sleep = sleep
        self.now = now
        self.session = ""
        self.seq = 0
        self.last_body = b""

    @property
    def has_token(self) -> bool:
        return "Authorization" in headers()

    def post(self, endpoint: str, body: bytes, more_headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        """`more_headers` are sent in the place of the usual ones of these names."""
        timeout_s = _RESET_TIMEOUT_S if endpoint in ("jointreset", "reset") else self._timeout_s
        with contextlib.closing(connect(self._url, timeout_s)) as connection:
            connection.request("POST", f"/{endpoint}", body, {**headers(), **(more_headers or {})})
            response = connection.getresponse()
            return response.status, response.read()

    def ask(self, endpoint: str, **content: Any) -> tuple[int, Content]:
        """Any request, NaN included."""
        body = json.dumps(content).encode()
        status, data = self.post(endpoint, body)
        return status, loads(data)

    def describe(self) -> Description:
        _, content = self.ask("describe")
        return description_of(content)

    def command(self, endpoint: str, **content: Any) -> tuple[int, Content]:
        """With this session and the next sequence number; `last_body` is what was sent."""
        self.seq += 1
        self.last_body = json.dumps({**content, "session": self.session, "seq": self.seq}).encode()
        status, data = self.post(endpoint, self.last_body)
        return status, loads(data)

    def done(self, endpoint: str, **content: Any) -> Content:
        """A command that has to be carried out."""
        status, answer = self.command(endpoint, **content)
        if status != http.client.OK:
            raise Surprise(f"/{endpoint}", "status 200", f"status {status}: {shown(answer)}")
        self.expect_seq(f"/{endpoint}", self.seq, answer)
        return answer

    def refused(self, code: str, endpoint: str, **content: Any) -> None:
        """A command that has to be refused with this code."""
        status, answer = self.command(endpoint, **content)
        self.expect_refusal(code, f"/{endpoint} {shown(content)}", status, answer, self.seq)

    def expect_refusal(self, code: str, sent: str, status: int, answer: Content, seq: int | None = None) -> None:
        """`seq`: of the request, if it was one of a session."""
        if status == http.client.OK or answer.get("error") != code:
            raise Surprise(sent, f"a refusal with the code {code}", f"status {status}: {shown(answer)}")
        was_read = answer.get("seq") is not None or code not in _MAY_LACK_SEQ
        if seq is not None and was_read:
            self.expect_seq(sent, seq, answer)

    @staticmethod
    def expect_seq(sent: str, seq: int, answer: Content) -> None:
        if answer.get("seq") != seq:
            raise Surprise(f"{sent} with seq {seq}", "an answer with the same seq", shown(answer))

    def state(self, described: Description, *cameras: str) -> RobotState:
        return state_of(self.done("getstate", cameras=list(cameras)), described, cameras)

    def look(self, described: Description, *cameras: str) -> RobotState:
        """Without a session: any server may be asked."""
        status, answer = self.ask("getstate", cameras=list(cameras))
        if status != http.client.OK:
            raise Surprise("/getstate without a session", "status 200", f"status {status}: {shown(answer)}")
        return state_of(answer, described, cameras)

    def hold_still(self, described: Description, **changes: Any) -> Content:
        """A pose command for where the hand is: nothing should move."""
        now = self.state(described)
        return {"arr": now.pose.tolist(), "based_on": now.time, **changes}

    def begin(self) -> None:
        """A new session on a robot that is ready."""
        self.end()
        status, answer = self.ask("open", client="nightshift robot check")
        if status != http.client.OK or not isinstance(answer.get("session"), str):
            raise Surprise("/open", "status 200 and a session", f"status {status}: {shown(answer)}")
        self.session, self.seq = answer["session"], 0
        self.done("clearerr")

    def end(self) -> None:
        if self.session:
            self.ask("close", session=self.session, seq=self.seq + 1)
            self.session = ""


def shown(content: Any) -> str:
    text = json.dumps(content)
    return text if len(text) <= 160 else f"{text[:160]}…"  # noqa: PLR2004 - a line or two of a table
