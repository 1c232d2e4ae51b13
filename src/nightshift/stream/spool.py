"""The actor's side on disk: every episode that the learner has not acknowledged.

spool/  lock                                         held by the one process that works here
        epoch.json                                   the last epoch that was begun
        waiting/   schema.json, <identity>.<checksum>.safetensors
        rejected/  <identity>.<checksum>.safetensors with <identity>.<checksum>.json: what the learner would not have
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from nightshift import files
from nightshift.data import episode as episodes
from nightshift.data import tensors
from nightshift.data.episode import Episode
from nightshift.data.schema import Range
from nightshift.data.shelf import Shelf
from nightshift.data.tensors import SUFFIX
from nightshift.errors import DataError, NightshiftError, StreamError
from nightshift.project.locks import Claim
from nightshift.stream.identity import Identity
from nightshift.stream.message import Label, Parcel, Receipt, checksum

EPOCH = "epoch.json"
WAITING = "waiting"
REJECTED = "rejected"


@dataclass(frozen=True, kw_only=True)
class Room:
    """How much may wait for the learner."""

    episodes: int = 1000
    bytes: int = 20 * 2**30
    patience: float | None = None
    """Seconds that `put` waits for room before it raises; None waits for as long as it takes, 0 not at all."""


class Spool:
    def __init__(
        self,
        folder: Path,
        *,
        run: str,
        actor: str,
        room: Room = Room(),  # noqa: B008 (frozen)
        ranges: Mapping[str, Range] | None = None,
    ) -> None:
        """Begin a new epoch; what earlier ones left is sent first, under the identity it was spooled with."""
        self._next = Identity(run, actor, 0, 0)
        self._folder = folder
        self._room = room
        self._claim = Claim(folder, StreamError)
        self._shelf = Shelf(folder / WAITING, ranges=ranges)
        self._next = replace(self._next, epoch=_begin_epoch(folder / EPOCH))
        self._sizes = _leftovers(self._shelf)
        self._putting = threading.Lock()
        self._changed = threading.Condition()
        self._counts: Counter[str] = Counter()
        self._hindrance = ""
        self._failure: BaseException | None = None

    def put(self, episode: Episode) -> Identity:
        """Keep an episode until the learner has it; when this returns it survives a power cut."""
        with self._putting:
            identity = self._next
            self._next = replace(identity, number=identity.number + 1)
            named = replace(episode, provenance=replace(episode.provenance, origin=identity.key))
            self._shelf.admit(named, str(identity))
            pieces = list(tensors.chunks(episodes.columns(named), json.dumps(episodes.header(named))))
            size = sum(map(len, pieces))
            label = Label(identity, checksum(pieces))
            self._await_room(size)
            files.write_chunks(self._shelf.path(label.key), pieces)
            with self._changed:
                self._sizes[label] = size
                self._counts["inserted"] += 1
                self._changed.notify_all()
        return identity

    def waiting(self, limit: int | None = None) -> Iterator[Parcel]:
        """The oldest that wait, read one by one."""
        with self._changed:
            labels = sorted(self._sizes, key=lambda label: label.identity)[:limit]
        for label in labels:
            content = self._shelf.path(label.key).read_bytes()
            self._count("sent")
            yield Parcel(label, content)

    def settle(self, receipt: Receipt) -> None:
        """Act on the learner's word."""
        label = receipt.label
        if receipt.outcome == "rejected":
            self._set_aside(label, receipt.reason)
        else:
            self._shelf.path(label.key).unlink()
        with self._changed:
            del self._sizes[label]
            self._counts["rejected" if receipt.outcome == "rejected" else "acknowledged"] += 1
            self._counts["duplicates"] += receipt.outcome == "duplicate"
            self._changed.notify_all()

    def hinder(self, reason: str) -> None:
        """Why nothing leaves, to be told when the spool is full; empty when all is well again."""
        with self._changed:
            self._counts["link_failures"] += bool(reason)
            self._hindrance = reason

    def fail(self, error: BaseException) -> None:
        """Nothing will ever leave: raised by `put` and `await_empty` from now on."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def await_empty(self, timeout: float | None = None) -> None:
        """Wait until the learner has everything."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or not self._sizes, timeout)
            self._raise_failure()
            if self._sizes:
                raise StreamError(
                    f"{len(self._sizes)} episodes still wait in {self._folder}{self._because()}",
                    "they are safe there and are sent when an actor opens that folder again",
                )

    def await_work(self, timeout: float, stop: threading.Event) -> None:
        """Wait until something waits, or until `wake` is called after `stop` was set."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._sizes) or stop.is_set(), timeout)

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def metrics(self) -> dict[str, float]:
        names = ("inserted", "sent", "acknowledged", "duplicates", "rejected", "link_failures")
        with self._changed:
            counted = {f"stream/{name}": float(self._counts[name]) for name in names}
            held = {"stream/spooled": float(len(self._sizes)), "stream/spooled_bytes": float(sum(self._sizes.values()))}
        return counted | held

    def close(self) -> None:
        """Leave the folder to others; what waits in it stays."""
        self._claim.release()

    def _await_room(self, size: int) -> None:
        if size > self._room.bytes:
            raise DataError(
                f"the episode has {size} bytes and the spool holds {self._room.bytes}", "give the spool more room"
            )
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._has_room(size), self._room.patience)
            self._raise_failure()
            if not self._has_room(size):
                raise StreamError(
                    f"the spool {self._folder} is full: {len(self._sizes)} episodes wait for the learner, "
                    f"{sum(self._sizes.values())} bytes{self._because()}",
                    "start the learner, or give the spool more room; nothing that was put is lost",
                )

    def _has_room(self, size: int) -> bool:
        return len(self._sizes) < self._room.episodes and sum(self._sizes.values()) + size <= self._room.bytes

    def _because(self) -> str:
        return f"; {self._hindrance}" if self._hindrance else ""

    def _raise_failure(self) -> None:
        if isinstance(self._failure, NightshiftError):
            raise self._failure
        if self._failure is not None:
            raise StreamError(f"the courier of {self._folder} stopped: {self._failure!r}") from self._failure

    def _set_aside(self, label: Label, reason: str) -> None:
        aside = self._folder / REJECTED / f"{label.key}{SUFFIX}"
        files.write_json(aside.with_name(f"{label.key}.json"), {"reason": reason})
        self._shelf.path(label.key).rename(aside)

    def _count(self, name: str) -> None:
        with self._changed:
            self._counts[name] += 1


def _begin_epoch(path: Path) -> int:
    """Larger than every epoch before, on the disk before it is used.

    It starts from the clock, so that an actor whose disk was lost does not repeat identities it has used.
    """
    try:
        last = json.loads(path.read_text())["epoch"] if path.exists() else 0
        epoch = max(last + 1, int(time.time()))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged: {error!r}", "delete it: a new epoch starts from the clock") from None
    files.write_json(path, {"epoch": epoch})
    return epoch


def _leftovers(shelf: Shelf) -> dict[Label, int]:
    keys = shelf.keys()
    try:
        return {Label.of_key(key): shelf.path(key).stat().st_size for key in keys}
    except DataError as error:
        raise DataError(f"{shelf.folder} holds a file that is not an actor's: {error.what}", "move it away") from None
