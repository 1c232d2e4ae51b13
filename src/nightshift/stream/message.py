"""The messages between actor and learner: an episode as the bytes of its file, and the ack for it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import google_crc32c
import numpy as np

from nightshift.errors import DataError
from nightshift.stream.episode_id import EpisodeId

_CHECKSUM = re.compile(r"[0-9a-f]{8}")

Buffer = bytes | memoryview
AckOutcome = Literal["accepted", "duplicate", "rejected", "deferred"]


@dataclass(frozen=True, slots=True)
class MessageHeader:
    """The ID of an episode and the CRC-32C of its bytes, which detects damage after it was spooled."""

    episode_id: EpisodeId
    checksum: int

    @property
    def key(self) -> str:
        return f"{self.episode_id.key}.{self.checksum:08x}"

    @classmethod
    def from_key(cls, key: str) -> MessageHeader:
        name, _, checksum = key.rpartition(".")
        if not _CHECKSUM.fullmatch(checksum):
            raise DataError(f"{key!r} is not the key of a message")
        return cls(EpisodeId.from_key(name), int(checksum, 16))


@dataclass(frozen=True, slots=True)
class Message:
    header: MessageHeader
    payload: Buffer  # the episode's safetensors file


@dataclass(frozen=True, slots=True)
class Ack:
    """The learner's answer to a message. After accepted or duplicate the episode is durable in the inbox.

    A deferred episode is to be sent again later: the learner has no room for it now.
    """

    header: MessageHeader
    outcome: AckOutcome
    reason: str = ""  # why it was rejected or deferred


def checksum(pieces: Iterable[Buffer]) -> int:
    value = 0
    for piece in pieces:
        value = google_crc32c.extend(value, np.frombuffer(piece, np.uint8))
    return value
