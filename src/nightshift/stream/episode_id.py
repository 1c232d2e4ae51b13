"""The ID of an episode across actors and restarts, and the file name made from it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nightshift.errors import DataError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_KEY = re.compile(r"([^.]+)\.([^.]+)\.([0-9]{20})\.([0-9]{9})")


@dataclass(frozen=True, order=True, slots=True)
class EpisodeId:
    """Episode `number` of one epoch of an actor; an epoch begins each time the actor process starts.

    Example: EpisodeId(run="night-7", actor="arm-left", epoch=17947321338059214637, number=41)
    """

    run: str
    actor: str
    epoch: int
    number: int

    def __post_init__(self) -> None:
        for name in (self.run, self.actor):
            if not _NAME.fullmatch(name):
                raise DataError(
                    f"{name!r} cannot be the name of a run or an actor", "use at most 64 letters, digits, _ and -"
                )
        if not (0 <= self.epoch < 10**20 and 0 <= self.number < 10**9):
            raise DataError(f"epoch {self.epoch}, number {self.number} is out of range for an episode ID")

    @property
    def key(self) -> str:
        """A valid file name; keys sort in the same order as IDs."""
        return f"{self.run}.{self.actor}.{self.epoch:020d}.{self.number:09d}"

    @classmethod
    def from_key(cls, key: str) -> EpisodeId:
        match = _KEY.fullmatch(key)
        if match is None:
            raise DataError(f"{key!r} is not the key of an episode")
        run, actor, epoch, number = match.groups()
        return cls(run, actor, int(epoch), int(number))

    def __str__(self) -> str:
        return f"episode {self.number} of actor {self.actor}, epoch {self.epoch}, run {self.run}"
