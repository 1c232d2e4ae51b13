"""The learner's side on disk: every episode it has accepted, once, in the order in which they came.

inbox/  lock
        episodes/  schema.json, <position>.<identity>.<checksum>.safetensors

One rename commits an episode, the mark that it is here, its place in the order and its checksum: there is no second
thing that could disagree. To recover is to list the folder.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nightshift import files
from nightshift.data import episode as episodes
from nightshift.data.episode import Episode
from nightshift.data.schema import Range
from nightshift.data.shelf import Shelf
from nightshift.errors import DataError, StreamError
from nightshift.project.locks import Claim
from nightshift.stream.identity import Identity
from nightshift.stream.message import Label, Parcel, Receipt, checksum

EPISODES = "episodes"
_NOT_AN_EPISODE = (TypeError, ValueError, KeyError, IndexError, AttributeError, RecursionError)
"""What Python says when arrays and header are well-formed and yet not those of an episode."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Arrival:
    """An episode that is here for good."""

    position: int  # 1 for the first
    label: Label
    path: Path

    def load(self) -> Episode:
        """The episode, its arrays as views of its file."""
        return episodes.load(self.path)


class Inbox:
    """Threads may share it."""

    def __init__(self, folder: Path, *, run: str, ranges: Mapping[str, Range] | None = None) -> None:
        self._run = run
        self._claim = Claim(folder, StreamError)
        self._shelf = Shelf(folder / EPISODES, ranges=ranges)
        self._arrivals = _recover(self._shelf)
        self._known = {arrival.label.identity: arrival.label for arrival in self._arrivals}
        self._refuse_mixture()
        self._last = self._arrivals[-1].position if self._arrivals else 0
        self._arrived = threading.Condition()
        self._counts: Counter[str] = Counter()
        self._broken = False

    def receive(self, parcel: Parcel) -> Receipt:
        """Store an episode unless it is here already or does not belong here."""
        try:
            self._refuse_foreign(parcel.label)
            receipt = self._duplicate(parcel.label)
            if receipt is None:
                self._examine(parcel)
                receipt = self._commit(parcel)
        except DataError as error:
            _log.warning("rejected: %s", error.what)
            receipt = Receipt(parcel.label, "rejected", error.what)
        with self._arrived:
            self._counts[receipt.outcome] += 1
        return receipt

    def since(self, position: int) -> list[Arrival]:
        """What came after `position`, in order: who keeps the last position it dealt with meets each episode once."""
        with self._arrived:
            return self._arrivals[bisect_right(self._arrivals, position, key=lambda arrival: arrival.position) :]

    def await_arrival(self, position: int, timeout: float | None = None) -> bool:
        """Wait until something came after `position`; False if nothing did."""
        with self._arrived:
            return self._arrived.wait_for(lambda: self._last > position, timeout)

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, identity: Identity) -> bool:
        return identity in self._known

    def metrics(self) -> dict[str, float]:
        with self._arrived:
            counted = {f"inbox/{name}": float(self._counts[name]) for name in ("accepted", "duplicate", "rejected")}
            return counted | {"inbox/stored": float(len(self._known))}

    def close(self) -> None:
        self._claim.release()

    def _refuse_foreign(self, label: Label) -> None:
        if label.identity.run != self._run:
            raise DataError(f"{label.identity}: this is the learner of run {self._run}")

    def _refuse_mixture(self) -> None:
        """What no learner of this run can have left here."""
        if runs := {identity.run for identity in self._known} - {self._run}:
            found = f"{self._shelf.folder} holds episodes of run {', '.join(sorted(runs))}, not of {self._run}"
            raise DataError(found, "use another folder, or name the run as it was")
        if len(self._known) < len(self._arrivals):
            raise DataError(f"{self._shelf.folder} holds an episode twice", "move the copy away")

    def _duplicate(self, label: Label) -> Receipt | None:
        known = self._known.get(label.identity)
        if known is None:
            return None
        if known != label:
            raise DataError(f"{label.identity}: another episode is stored under this identity")
        return Receipt(label, "duplicate")

    def _examine(self, parcel: Parcel) -> None:
        identity = parcel.label.identity
        if checksum([parcel.content]) != parcel.label.checksum:
            raise DataError(f"{identity}: its checksum does not fit its content; it was damaged on the way")
        try:
            episode = _decode(parcel)
            if episode.provenance.origin != identity.key:
                raise DataError(f"{identity}: by its own word it is {episode.provenance.origin!r}")
            with self._arrived if self._shelf.schema is None else contextlib.nullcontext():
                self._shelf.admit(episode, str(identity))
        except _NOT_AN_EPISODE as error:
            raise DataError(f"{identity}: it is not an episode: {error!r}") from None

    def _commit(self, parcel: Parcel) -> Receipt:
        """Write beside each other, rename one after the other."""
        label = parcel.label
        with files.staged(self._shelf.path(label.key), [parcel.content]) as temporary, self._arrived:
            if receipt := self._duplicate(label):
                return receipt
            if self._broken:
                raise StreamError(f"{self._shelf.folder} could not be written", "mend the disk and restart the learner")
            arrival = _arrival(self._shelf, self._last + 1, label)
            self._broken = True  # whatever goes wrong now, only the folder itself can tell whether the file is in it
            files.settle(temporary, arrival.path)
            self._broken = False
            self._arrivals.append(arrival)
            self._known[label.identity] = label
            self._last = arrival.position
            self._arrived.notify_all()
        return Receipt(label, "accepted")


def _recover(shelf: Shelf) -> list[Arrival]:
    """What a learner before this one committed; a rename it did not live to sync is made to last."""
    arrivals, keys = [], shelf.keys()
    for key in keys:
        position, _, name = key.partition(".")
        try:
            arrivals.append(_arrival(shelf, int(position), Label.of_key(name)))
        except (ValueError, DataError):
            raise DataError(f"{shelf.path(key)} was not written by a learner", "move it away") from None
    if arrivals:
        files.sync(shelf.folder)
    return arrivals


def _decode(parcel: Parcel) -> Episode:
    try:
        return episodes.from_bytes(parcel.content)
    except DataError as error:
        raise DataError(f"{parcel.label.identity}: {error.what}") from None


def _arrival(shelf: Shelf, position: int, label: Label) -> Arrival:
    return Arrival(position, label, shelf.path(f"{position:09d}.{label.key}"))
