"""The link of an actor on another machine, or in another process."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from nightshift.errors import StreamError
from nightshift.stream.handshake import check_token, enter
from nightshift.stream.link import LinkDown
from nightshift.stream.message import Label, Outcome, Parcel, Receipt
from nightshift.stream.weights import Weights
from nightshift.stream.wire import PATIENCE, BrokenFrame, Channel, number, text

_UNDER_WAY = 2
"""Parcels sent before the first receipt: one travels while the other is being stored."""
_OUTCOMES = get_args(Outcome)


class TcpLink:
    """Connects when it is first used, and again after every failure."""

    def __init__(self, host: str, port: int, *, token: str | None = None, patience: float = PATIENCE) -> None:
        """`patience` is for the learner to answer, in seconds."""
        check_token(token)
        self._address = (host, port)
        self._token = token
        self._patience = patience
        self._open: Channel | None = None
        self._largest = 0

    def send(self, parcels: Iterable[Parcel]) -> Iterator[Receipt]:
        under_way: deque[Label] = deque()
        try:
            for parcel in parcels:
                if refused := self._hand_over(parcel):
                    yield refused
                    continue
                under_way.append(parcel.label)
                if len(under_way) == _UNDER_WAY:
                    yield self._receipt(under_way.popleft())
            while under_way:
                yield self._receipt(under_way.popleft())
        finally:
            if under_way:  # left early: what comes next on this connection would answer another question
                self.close()

    def weights(self, newer_than: int) -> Weights | None:
        with self._channel() as channel:
            channel.send({"ask": "weights", "newer_than": newer_than})
            answer, payload = _answer(channel)
            if answer.get("version", 0) is None:
                return None
            return Weights(number(answer, "version"), bytes(payload))

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def _hand_over(self, parcel: Parcel) -> Receipt | None:
        """Send it off. One that the learner would hang up on, every time, is refused here: others wait behind it."""
        with self._channel() as channel:
            if (size := len(parcel.content)) > self._largest:
                reason = f"{parcel.label.identity}: it has {size} bytes; the learner takes {self._largest}"
                return Receipt(parcel.label, "rejected", reason)
            channel.send({"ask": "store", "key": parcel.label.key}, parcel.content)
        return None

    def _receipt(self, label: Label) -> Receipt:
        with self._channel() as channel:
            answer, _ = _answer(channel)
            outcome = text(answer, "outcome")
            if outcome not in _OUTCOMES:
                raise BrokenFrame(f"an outcome {outcome!r:.80}")
            return Receipt(label, outcome, text(answer, "reason"))  # type: ignore[arg-type]

    @contextlib.contextmanager
    def _channel(self) -> Iterator[Channel]:
        """The connection; an error in its use ends it."""
        try:
            if self._open is None:
                self._open = self._connect()
            yield self._open
        except (StreamError, OSError) as error:
            self.close()
            host, port = self._address
            what = error.what if isinstance(error, StreamError) else str(error)
            raise LinkDown(f"no learner at {host}:{port}: {what}", "start the learner; sending goes on then") from error

    def _connect(self) -> Channel:
        channel = Channel(socket.create_connection(self._address, self._patience), patience=self._patience)
        try:
            self._largest = enter(channel, self._token)
        except BaseException:
            channel.close()
            raise
        return channel


def _answer(channel: Channel) -> tuple[dict[str, Any], memoryview]:
    answer, payload = channel.receive()
    if "error" in answer:
        raise StreamError(text(answer, "error"))
    return answer, payload
