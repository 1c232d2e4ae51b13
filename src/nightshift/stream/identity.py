"""What tells one episode from all others, and the names of files made of it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nightshift.errors import DataError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_KEY = re.compile(r"([^.]+)\.([^.]+)\.([0-9]{10})\.([0-9]{9})")


@dataclass(frozen=True, order=True, slots=True)
class Identity:
    """The `number`th episode that an actor of a run made since it was started for the `epoch`th time.

    Example: Identity(run="night-7", actor="arm-left", epoch=1794732133, number=41)
    """

    run: str
    actor: str
    epoch: int
    number: int

    def __post_init__(self) -> None:
        for name in (self.run, self.actor):
            if not _NAME.fullmatch(name):
                raise DataError(
                    f"{name!r} cannot be the name of a run or an actor", "use at most 64 letters, digits and dashes"
                )
        if not (0 <= self.epoch < 10**10 and 0 <= self.number < 10**9):
            raise DataError(f"epoch {self.epoch}, number {self.number} cannot be those of an episode")

    @property
    def key(self) -> str:
        """Safe as the name of a file; sorts as identities do."""
        return f"{self.run}.{self.actor}.{self.epoch:010d}.{self.number:09d}"

    @classmethod
    def of_key(cls, key: str) -> Identity:
        match = _KEY.fullmatch(key)
        if match is None:
            raise DataError(f"{key!r} does not name an episode of an actor")
        run, actor, epoch, number = match.groups()
        return cls(run, actor, int(epoch), int(number))

    def __str__(self) -> str:
        return f"episode {self.number} of actor {self.actor}, epoch {self.epoch}, run {self.run}"
