"""The TCP link of an actor to a learner on another machine or in another process."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from typing import Any, get_args

from nightshift.access import check_token
from nightshift.errors import StreamError
from nightshift.stream.handshake import Welcome, client_handshake
from nightshift.stream.link import LearnerChanged, LinkDown
from nightshift.stream.message import Ack, AckOutcome, Message, MessageHeader
from nightshift.stream.weights import MAX_FILE_BYTES, Weights
from nightshift.stream.wire import DEFAULT_TIMEOUT, Channel, ProtocolError, int_field, str_field

_MAX_IN_FLIGHT = 2
"""Messages sent before the first ack: one is in transit while the learner stores the other."""
_ACK_OUTCOMES = get_args(AckOutcome)


class TcpLink:
    """Connects on first use, and again after every failure."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        actor: str = "",
        token: str | None = None,
        incarnation: str = "",
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        """`actor`: its name, for a learner that orders episodes from the actors that it knows.

        `incarnation` of the only learner to connect to, else LearnerChanged; "" connects to any, also after a restart.
        `timeout` is the time in seconds that the learner has to answer.
        """
        check_token(token)
        self._address = (host, port)
        self._actor = actor
        self._token = token
        self._timeout = timeout
        self._open: Channel | None = None
        self._wanted = incarnation
        self._welcome: Welcome | None = None

    @property
    def incarnation(self) -> str:
        """Of the learner that it was connected to last."""
        return self._welcome.incarnation if self._welcome else ""

    def send(self, messages: Iterable[Message]) -> Generator[Ack, None, None]:
        in_flight: deque[MessageHeader] = deque()
        try:
            for message in messages:
                if refused := self._send_message(message):
                    yield refused
                    continue
                in_flight.append(message.header)
                if len(in_flight) == _MAX_IN_FLIGHT:
                    yield self._receive_ack(in_flight.popleft())
            while in_flight:
                yield self._receive_ack(in_flight.popleft())
        finally:
            if in_flight:  # stopped early: the next answer on this connection would belong to an earlier message
                self.close()

    def weights(self, newer_than: int) -> Weights | None:
        with self._channel() as channel:
            channel.send({"ask": "weights", "newer_than": newer_than, "actor": self._actor})
            answer, payload = _answer(channel, MAX_FILE_BYTES)
            if answer.get("version", 0) is None:
                return None
            return Weights(int_field(answer, "version"), bytes(payload))

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def _send_message(self, message: Message) -> Ack | None:
        """Send a message. One that is too large for the learner is rejected here, or it would be retried forever."""
        with self._channel() as channel:
            assert self._welcome is not None
            if (size := len(message.payload)) > self._welcome.largest:
                reason = f"{message.header.episode_id}: it has {size} bytes; the learner takes {self._welcome.largest}"
                return Ack(message.header, "rejected", reason)
            channel.send({"ask": "store", "key": message.header.key, "actor": self._actor}, message.payload)
        return None

    def _receive_ack(self, header: MessageHeader) -> Ack:
        with self._channel() as channel:
            answer, _ = _answer(channel)
            outcome = str_field(answer, "outcome")
            if outcome not in _ACK_OUTCOMES:
                raise ProtocolError(f"the ack has an unknown outcome {outcome!r:.80}")
            return Ack(header, outcome, str_field(answer, "reason"))  # type: ignore[arg-type]

    @contextlib.contextmanager
    def _channel(self) -> Iterator[Channel]:
        """The open connection; an error inside the block closes it and raises LinkDown."""
        try:
            if self._open is None:
                self._open = self._connect()
            yield self._open
        except (StreamError, OSError) as error:
            self.close()
            host, port = self._address
            what = error.what if isinstance(error, StreamError) else str(error)
            raise LinkDown(f"no learner at {host}:{port}: {what}", "start the learner; the actor reconnects") from error

    def _connect(self) -> Channel:
        channel = Channel(socket.create_connection(self._address, self._timeout), timeout=self._timeout)
        try:
            self._welcome = client_handshake(channel, self._token)
            if self._wanted not in ("", self._welcome.incarnation):
                host, port = self._address
                raise LearnerChanged(f"the learner at {host}:{port} was started again", "start the actor again")
        except BaseException:
            channel.close()
            raise
        return channel


def _answer(channel: Channel, max_payload: int = 0) -> tuple[dict[str, Any], memoryview]:
    answer, payload = channel.receive(max_payload=max_payload)
    if "error" in answer:
        raise StreamError(str_field(answer, "error"))
    return answer, payload
