"""What travels: an episode as the bytes of its file, and what becomes of it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import google_crc32c
import numpy as np

from nightshift.errors import DataError
from nightshift.stream.identity import Identity

_CHECKSUM = re.compile(r"[0-9a-f]{8}")

Buffer = bytes | memoryview
Outcome = Literal["accepted", "duplicate", "rejected"]


@dataclass(frozen=True, slots=True)
class Label:
    """Which episode it is, and the CRC-32C of its bytes: as long as they agree it is the one that was spooled."""

    identity: Identity
    checksum: int

    @property
    def key(self) -> str:
        return f"{self.identity.key}.{self.checksum:08x}"

    @classmethod
    def of_key(cls, key: str) -> Label:
        name, _, checksum = key.rpartition(".")
        if not _CHECKSUM.fullmatch(checksum):
            raise DataError(f"{key!r} does not name an episode of an actor")
        return cls(Identity.of_key(name), int(checksum, 16))


@dataclass(frozen=True, slots=True)
class Parcel:
    label: Label
    content: Buffer


@dataclass(frozen=True, slots=True)
class Receipt:
    """The learner's word. Accepted or duplicate: the episode is stored and survives a power cut."""

    label: Label
    outcome: Outcome
    reason: str = ""  # for people, when rejected


def checksum(pieces: Iterable[Buffer]) -> int:
    value = 0
    for piece in pieces:
        value = google_crc32c.extend(value, np.frombuffer(piece, np.uint8))
    return value
