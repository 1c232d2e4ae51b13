"""The link between processes of a Ray cluster. The learner's endpoint is a Ray actor, which Ray restarts if it dies."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from nightshift.data.tensors import Column
from nightshift.errors import NightshiftError
from nightshift.stream.inbox import StoredEpisode
from nightshift.stream.link import LearnerEndpoint, LinkDown
from nightshift.stream.message import Ack, Buffer, Message, MessageHeader
from nightshift.stream.weights import Weights

REPLY_TIMEOUT = 60.0
"""Seconds to wait for a reply of the endpoint, including a restart by Ray."""
MAX_UNREAD = 256
"""Episodes beyond the position that the learner asked for last; more are deferred until it asks again."""
_MAX_IN_FLIGHT = 2
_MAX_CONCURRENCY = 8


class RayLearnerEndpoint:
    """The class of the Ray actor. Its state is in its folder, so a restart loses nothing."""

    def __init__(self, folder: Path, run: str) -> None:
        endpoint = LearnerEndpoint.open(folder, run=run)
        self._inbox, self._publisher = endpoint.inbox, endpoint.publisher
        self._read = 0
        self._inbox.accept_while(lambda: len(self._inbox.stored_after(self._read)) < MAX_UNREAD)

    def store(self, header: MessageHeader, payload: Buffer) -> Ack:
        return self._inbox.receive(Message(header, payload))

    def latest(self, newer_than: int) -> Weights | None:
        return self._publisher.latest(newer_than)

    def publish(self, arrays: Mapping[str, Column]) -> int:
        return self._publisher.publish(arrays)

    def stored_after(self, position: int) -> list[StoredEpisode]:
        """For a learner on the same machine, which can open the files; it has read everything up to `position`."""
        self._read = position
        return self._inbox.stored_after(position)

    def metrics(self) -> dict[str, float]:
        return self._inbox.metrics()


def start_endpoint(folder: Path, run: str) -> Any:
    """Start the endpoint as a Ray actor and return its handle; `folder` is a path on the machine where it runs."""
    options = {"num_cpus": 0, "max_restarts": -1, "max_concurrency": _MAX_CONCURRENCY}
    return ray.remote(**options)(RayLearnerEndpoint).remote(folder, run)


class RayLink:
    def __init__(self, endpoint: Any) -> None:
        """`endpoint` is the handle of a Ray actor with the methods of RayLearnerEndpoint."""
        self._endpoint = endpoint

    def send(self, messages: Iterable[Message]) -> Iterator[Ack]:
        in_flight: deque[Any] = deque()
        for message in messages:
            in_flight.append(self._endpoint.store.remote(message.header, message.payload))
            if len(in_flight) == _MAX_IN_FLIGHT:
                yield _get(in_flight.popleft())
        while in_flight:
            yield _get(in_flight.popleft())

    def weights(self, newer_than: int) -> Weights | None:
        weights: Weights | None = _get(self._endpoint.latest.remote(newer_than))
        return weights

    def close(self) -> None:
        pass


def _get(reference: Any) -> Any:
    try:
        return ray.get(reference, timeout=REPLY_TIMEOUT)
    except RayTaskError as error:
        if not isinstance(error.cause, NightshiftError | OSError):
            raise
        raise LinkDown(f"the learner reports an error: {error.cause}") from error
    except RayError as error:
        raise LinkDown(f"the learner's endpoint does not reply: {type(error).__name__}") from error
