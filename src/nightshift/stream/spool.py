"""The actor's episodes on disk: every episode that the learner has not acknowledged yet.

spool/  lock                                         held by the one process that uses the folder
        epoch.json                                   the last epoch
        waiting/   schema.json, <episode_id>.<checksum>.safetensors
        rejected/  <episode_id>.<checksum>.safetensors, and the learner's reason in <episode_id>.<checksum>.json
"""

from __future__ import annotations

import itertools
import json
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from nightshift import files
from nightshift.closing import Closing
from nightshift.data import episode as episodes
from nightshift.data import tensors
from nightshift.data.episode import Episode
from nightshift.data.episode_store import EpisodeStore
from nightshift.data.schema import Range
from nightshift.data.tensors import SUFFIX
from nightshift.errors import DataError, NightshiftError, ProjectError, StreamError
from nightshift.project.locks import Claim
from nightshift.stream.episode_id import EpisodeId
from nightshift.stream.message import Ack, Message, MessageHeader, checksum

EPOCH = "epoch.json"
WAITING = "waiting"
REJECTED = "rejected"
SPOOLED = "stream/spooled"
"""The metric that says how many episodes wait in the spool."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SpoolLimits:
    """How much the spool may hold."""

    max_episodes: int = 1000
    max_bytes: int = 20 * 2**30
    timeout: float | None = None
    """Seconds that `put` blocks while the spool is full before it raises; None: without limit, 0: not at all."""


class Spool(Closing):
    def __init__(
        self,
        folder: Path,
        *,
        run: str,
        actor: str,
        limits: SpoolLimits = SpoolLimits(),  # noqa: B008 (frozen)
        ranges: Mapping[str, Range] | None = None,
    ) -> None:
        """A new epoch begins with the first `put`. Episodes of earlier epochs keep their IDs and are sent first."""
        self._next: EpisodeId | None = None
        self._name = EpisodeId(run, actor, 0, 0)
        self._folder = folder
        self._limits = limits
        self._claim = Claim(folder, StreamError)
        self._store = EpisodeStore(folder / WAITING, ranges=ranges)
        self._last_epoch = _last_epoch(folder / EPOCH)
        self._store.sweep()
        self._sizes = _recover(self._store)  # in the order of sending
        self._bytes = sum(self._sizes.values())
        self._putting = threading.Lock()
        self._changed = threading.Condition()
        self._counts: Counter[str] = Counter()
        self._obstacle = ""
        self._last_rejection = ""
        self._failure: BaseException | None = None

    def put(self, episode: Episode) -> EpisodeId:
        """Write an episode to disk until the learner acknowledges it; it is durable when this returns."""
        with self._putting:
            episode_id = self._next or replace(self._name, epoch=self._start_epoch())
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
                self._bytes += size
                self._counts["inserted"] += 1
                self._changed.notify_all()
        return episode_id

    def unacknowledged(self, limit: int | None = None) -> Iterator[Message]:
        """The oldest unacknowledged episodes, read one by one."""
        with self._changed:
            headers = list(itertools.islice(self._sizes, limit))
        for header in headers:
            payload = self._store.path(header.key).read_bytes()
            self._count("sent")
            yield Message(header, payload)

    def handle_ack(self, ack: Ack) -> None:
        """Delete an episode that the learner has stored, move a rejected one to rejected/, or keep a deferred one."""
        header = ack.header
        if ack.outcome == "deferred":
            self._count("deferred")
            return
        if ack.outcome == "rejected":
            self._move_to_rejected(header, ack.reason)
        else:
            self._store.path(header.key).unlink()
        with self._changed:
            self._bytes -= self._sizes.pop(header)
            if ack.outcome == "rejected":
                self._last_rejection = ack.reason
            self._counts["rejected" if ack.outcome == "rejected" else "acknowledged"] += 1
            self._counts["duplicates"] += ack.outcome == "duplicate"
            self._changed.notify_all()

    def set_obstacle(self, reason: str, *, is_link_failure: bool = False) -> None:
        """Set the reason that error messages of a full spool give; "" when episodes are taken again."""
        with self._changed:
            self._counts["link_failures"] += is_link_failure
            self._obstacle = reason

    def fail(self, error: BaseException) -> None:
        """Report that the sender has stopped for good: `put` and `wait_until_empty` raise this error from now on."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def check(self) -> None:
        """Raise the error that stopped the sender, or a StreamError if the learner rejected an episode."""
        with self._changed:
            self._raise_failure()
            if self._last_rejection:
                raise StreamError(
                    f"the learner rejected an episode: {self._last_rejection}", f"see {self._folder / REJECTED}"
                )

    def wait_until_empty(self, timeout: float | None = None) -> None:
        """Wait until the learner has acknowledged every episode."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or not self._sizes, timeout)
            self._raise_failure()
            if self._sizes:
                raise StreamError(
                    f"{len(self._sizes)} episodes are still in {self._folder}{self._obstacle_suffix()}",
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
        names = ("inserted", "sent", "acknowledged", "duplicates", "rejected", "deferred", "link_failures")
        with self._changed:
            counted = {f"stream/{name}": float(self._counts[name]) for name in names}
            held = {SPOOLED: float(len(self._sizes)), "stream/spooled_bytes": float(self._bytes)}
        return counted | held

    def close(self) -> None:
        """Release the folder; unacknowledged episodes stay in it."""
        self._claim.release()

    def _start_epoch(self) -> int:
        """Choose an epoch above every earlier one and write it to disk before it is used.

        It is the time in seconds and ten random digits, so an actor whose disk was lost, or another of the same name,
        does not use its IDs, not even in the same second.
        """
        epoch = max(self._last_epoch + 1, int(time.time()) * 10**10 + secrets.randbelow(10**10))
        files.write_json(self._folder / EPOCH, {"epoch": epoch})
        return epoch

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
                    f"{self._bytes} bytes{self._obstacle_suffix()}",
                    "start the learner, or increase the limits of the spool; no episode in it is lost",
                )

    def _has_space(self, size: int) -> bool:
        return len(self._sizes) < self._limits.max_episodes and self._bytes + size <= self._limits.max_bytes

    def _obstacle_suffix(self) -> str:
        return f"; {self._obstacle}" if self._obstacle else ""

    def _raise_failure(self) -> None:
        if isinstance(self._failure, NightshiftError):
            raise self._failure
        if self._failure is not None:
            raise StreamError(f"the sender of {self._folder} stopped: {self._failure!r}") from self._failure

    def _move_to_rejected(self, header: MessageHeader, reason: str) -> None:
        """If the disk is full, the others are sent all the same; the file stays, and the next start sends it again."""
        target = self._folder / REJECTED / f"{header.key}{SUFFIX}"
        try:
            files.write_json(target.with_name(f"{header.key}.json"), {"reason": reason})
            self._store.path(header.key).rename(target)
        except ProjectError as error:
            _log.error("a rejected episode stays in %s: %s (%s)", self._store.folder, error.what, reason)

    def _count(self, name: str) -> None:
        with self._changed:
            self._counts[name] += 1


def _last_epoch(path: Path) -> int:
    try:
        return int(json.loads(path.read_text())["epoch"]) if path.exists() else 0
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged: {error!r}", "delete it: a new epoch starts from the clock") from None


def _recover(store: EpisodeStore) -> dict[MessageHeader, int]:
    keys = store.keys()
    try:
        return {MessageHeader.from_key(key): store.path(key).stat().st_size for key in keys}
    except DataError as error:
        raise DataError(f"{store.folder} holds a file that no actor wrote: {error.what}", "move it elsewhere") from None
