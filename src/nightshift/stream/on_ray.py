"""The link between processes of a Ray cluster: the learner's desk is a Ray actor, which Ray starts again if it dies."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from nightshift.data.tensors import Column
from nightshift.errors import NightshiftError
from nightshift.stream.inbox import Arrival, Inbox
from nightshift.stream.link import LinkDown
from nightshift.stream.message import Buffer, Label, Parcel, Receipt
from nightshift.stream.weights import Publisher, Weights

PATIENCE = 60.0
"""Seconds for the desk to answer; Ray starting it again is part of that."""
_UNDER_WAY = 2
_CALLERS = 8


class RayDesk:
    """What runs in the Ray actor. All it knows is in its folder."""

    def __init__(self, folder: Path, run: str) -> None:
        self._inbox = Inbox(folder / "inbox", run=run)
        self._publisher = Publisher(folder / "weights")

    def store(self, label: Label, content: Buffer) -> Receipt:
        return self._inbox.receive(Parcel(label, content))

    def newest(self, newer_than: int) -> Weights | None:
        return self._publisher.newest(newer_than)

    def publish(self, arrays: Mapping[str, Column]) -> int:
        return self._publisher.publish(arrays)

    def since(self, position: int) -> list[Arrival]:
        """For a learner on the same machine: where the episodes lie that came after `position`."""
        return self._inbox.since(position)

    def metrics(self) -> dict[str, float]:
        return self._inbox.metrics()


def open_desk(folder: Path, run: str) -> Any:
    """The handle of a desk in a process of its own, to be given to actors; `folder` is on the machine it runs on."""
    options = {"num_cpus": 0, "max_restarts": -1, "max_concurrency": _CALLERS}
    return ray.remote(**options)(RayDesk).remote(folder, run)


class RayLink:
    def __init__(self, desk: Any) -> None:
        """`desk` is the handle of a Ray actor with the methods of RayDesk."""
        self._desk = desk

    def send(self, parcels: Iterable[Parcel]) -> Iterator[Receipt]:
        under_way: deque[Any] = deque()
        for parcel in parcels:
            under_way.append(self._desk.store.remote(parcel.label, parcel.content))
            if len(under_way) == _UNDER_WAY:
                yield _get(under_way.popleft())
        while under_way:
            yield _get(under_way.popleft())

    def weights(self, newer_than: int) -> Weights | None:
        weights: Weights | None = _get(self._desk.newest.remote(newer_than))
        return weights

    def close(self) -> None:
        pass


def _get(reference: Any) -> Any:
    try:
        return ray.get(reference, timeout=PATIENCE)
    except RayTaskError as error:
        if not isinstance(error.cause, NightshiftError | OSError):
            raise
        raise LinkDown(f"the learner cannot work: {error.cause}") from error
    except RayError as error:
        raise LinkDown(f"the learner's desk does not answer: {type(error).__name__}") from error
