"""The actor's episodes on disk: every episode that the learner has not acknowledged yet.

spool/  lock                                         held by the one process that uses the folder
        epoch.json                                   the epoch of the last start
        waiting/   schema.json, <episode_id>.<checksum>.safetensors
        rejected/  <episode_id>.<checksum>.safetensors, and the learner's reason in <episode_id>.<checksum>.json
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
from nightshift.data.episode_store import EpisodeStore
from nightshift.data.schema import Range
from nightshift.data.tensors import SUFFIX
from nightshift.errors import DataError, NightshiftError, StreamError
from nightshift.project.locks import Claim
from nightshift.stream.episode_id import EpisodeId
from nightshift.stream.message import Ack, Message, MessageHeader, checksum

EPOCH = "epoch.json"
WAITING = "waiting"
REJECTED = "rejected"


@dataclass(frozen=True, kw_only=True)
class SpoolLimits:
    """How much the spool may hold."""

    max_episodes: int = 1000
    max_bytes: int = 20 * 2**30
    timeout: float | None = None
    """Seconds that `put` blocks while the spool is full before it raises; None: without limit, 0: not at all."""


class Spool:
    def __init__(
        self,
        folder: Path,
        *,
        run: str,
        actor: str,
        limits: SpoolLimits = SpoolLimits(),  # noqa: B008 (frozen)
        ranges: Mapping[str, Range] | None = None,
    ) -> None:
        """Begin a new epoch. Episodes left by earlier epochs keep their IDs and are sent first."""
        self._next = EpisodeId(run, actor, 0, 0)
        self._folder = folder
        self._limits = limits
        self._claim = Claim(folder, StreamError)
        self._store = EpisodeStore(folder / WAITING, ranges=ranges)
        self._next = replace(self._next, epoch=_start_epoch(folder / EPOCH))
        self._sizes = _recover(self._store)
        self._putting = threading.Lock()
        self._changed = threading.Condition()
        self._counts: Counter[str] = Counter()
        self._link_error = ""
        self._failure: BaseException | None = None

    def put(self, episode: Episode) -> EpisodeId:
        """Write an episode to disk until the learner acknowledges it; it is durable when this returns."""
        with self._putting:
            episode_id = self._next
            self._next = replace(episode_id, number=episode_id.number + 1)
            named = replace(episode, provenance=replace(episode.provenance, origin=episode_id.key))
            self._store.admit(named, str(episode_id))
            pieces = list(tensors.chunks(episodes.columns(named), json.dumps(episodes.header(named))))
            size = sum(map(len, pieces))
            header = MessageHeader(episode_id, checksum(pieces))
            self._wait_for_space(size)
            files.write_chunks(self._store.path(header.key), pieces)
            with self._changed:
                self._sizes[header] = size
                self._counts["inserted"] += 1
                self._changed.notify_all()
        return episode_id

    def unacknowledged(self, limit: int | None = None) -> Iterator[Message]:
        """The oldest unacknowledged episodes, read one by one."""
        with self._changed:
            headers = sorted(self._sizes, key=lambda header: header.episode_id)[:limit]
        for header in headers:
            payload = self._store.path(header.key).read_bytes()
            self._count("sent")
            yield Message(header, payload)

    def handle_ack(self, ack: Ack) -> None:
        """Delete an episode that the learner has stored, or move a rejected one to rejected/."""
        header = ack.header
        if ack.outcome == "rejected":
            self._move_to_rejected(header, ack.reason)
        else:
            self._store.path(header.key).unlink()
        with self._changed:
            del self._sizes[header]
            self._counts["rejected" if ack.outcome == "rejected" else "acknowledged"] += 1
            self._counts["duplicates"] += ack.outcome == "duplicate"
            self._changed.notify_all()

    def set_link_error(self, reason: str) -> None:
        """Set the reason that error messages of a full spool give; "" when the link works again."""
        with self._changed:
            self._counts["link_failures"] += bool(reason)
            self._link_error = reason

    def fail(self, error: BaseException) -> None:
        """Report that the sender has stopped for good: `put` and `wait_until_empty` raise this error from now on."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def wait_until_empty(self, timeout: float | None = None) -> None:
        """Wait until the learner has acknowledged every episode."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or not self._sizes, timeout)
            self._raise_failure()
            if self._sizes:
                raise StreamError(
                    f"{len(self._sizes)} episodes are still in {self._folder}{self._link_error_suffix()}",
                    "they are on disk and are sent when an actor opens that folder again",
                )

    def wait_for_work(self, timeout: float, stop: threading.Event) -> None:
        """Wait until there is an episode to send, or until `wake` is called after `stop` was set."""
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
        """Release the folder; unacknowledged episodes stay in it."""
        self._claim.release()

    def _wait_for_space(self, size: int) -> None:
        if size > self._limits.max_bytes:
            raise DataError(
                f"the episode has {size} bytes and the spool may hold {self._limits.max_bytes}", "increase max_bytes"
            )
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._has_space(size), self._limits.timeout)
            self._raise_failure()
            if not self._has_space(size):
                raise StreamError(
                    f"the spool {self._folder} is full: {len(self._sizes)} episodes are unacknowledged, "
                    f"{sum(self._sizes.values())} bytes{self._link_error_suffix()}",
                    "start the learner, or increase the limits of the spool; no episode in it is lost",
                )

    def _has_space(self, size: int) -> bool:
        return (
            len(self._sizes) < self._limits.max_episodes and sum(self._sizes.values()) + size <= self._limits.max_bytes
        )

    def _link_error_suffix(self) -> str:
        return f"; {self._link_error}" if self._link_error else ""

    def _raise_failure(self) -> None:
        if isinstance(self._failure, NightshiftError):
            raise self._failure
        if self._failure is not None:
            raise StreamError(f"the sender of {self._folder} stopped: {self._failure!r}") from self._failure

    def _move_to_rejected(self, header: MessageHeader, reason: str) -> None:
        target = self._folder / REJECTED / f"{header.key}{SUFFIX}"
        files.write_json(target.with_name(f"{header.key}.json"), {"reason": reason})
        self._store.path(header.key).rename(target)

    def _count(self, name: str) -> None:
        with self._changed:
            self._counts[name] += 1


def _start_epoch(path: Path) -> int:
    """Choose an epoch above every earlier one and write it to disk before it is used.

    Epochs start from the clock, so an actor whose disk was lost does not reuse IDs.
    """
    try:
        last = json.loads(path.read_text())["epoch"] if path.exists() else 0
        epoch = max(last + 1, int(time.time()))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged: {error!r}", "delete it: a new epoch starts from the clock") from None
    files.write_json(path, {"epoch": epoch})
    return epoch


def _recover(store: EpisodeStore) -> dict[MessageHeader, int]:
    keys = store.keys()
    try:
        return {MessageHeader.from_key(key): store.path(key).stat().st_size for key in keys}
    except DataError as error:
        raise DataError(f"{store.folder} holds a file that no actor wrote: {error.what}", "move it elsewhere") from None
