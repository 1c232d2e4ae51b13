"""Versioned policy weights: published by the learner, fetched by actors."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nightshift import files
from nightshift.data import tensors
from nightshift.data.episode import NO_POLICY
from nightshift.data.tensors import Column
from nightshift.errors import DataError, StreamError

WEIGHTS = "weights.safetensors"


@dataclass(frozen=True, slots=True)
class Weights:
    """The bytes of a safetensors file with named arrays; its header holds the version."""

    version: int
    content: bytes

    def arrays(self) -> dict[str, Column]:
        return tensors.from_bytes(self.content)[0]


class WeightPublisher:
    """Keeps the latest weights of a run in one file, from which a restarted learner continues to count versions.

    Versions only grow, even if the learner resumes from an older checkpoint, so a version identifies one set of
    weights. Thread-safe.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / WEIGHTS
        self._latest = _read(self._path)
        self._publishing = threading.Lock()

    @property
    def version(self) -> int:
        return self._latest.version if self._latest else NO_POLICY

    def publish(self, arrays: Mapping[str, Column]) -> int:
        """Publish these weights and return their version, which is never reused."""
        with self._publishing:
            version = self.version + 1
            content = tensors.to_bytes(arrays, json.dumps({"version": version}))
            files.write_bytes(self._path, content)
            self._latest = Weights(version, content)
        return version

    def latest(self, newer_than: int = NO_POLICY) -> Weights | None:
        """The latest weights, or None if their version is not above `newer_than`."""
        if newer_than > self.version:
            raise StreamError(
                f"an actor has weights of version {newer_than}, and the last published here is {self.version}",
                f"restore {self._path}, or restart the actor",
            )
        return self._latest if self.version > newer_than else None


def _read(path: Path) -> Weights | None:
    if not path.exists():
        return None
    content = path.read_bytes()
    try:
        return Weights(int(json.loads(tensors.from_bytes(content)[1])["version"]), content)
    except (DataError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged: {error}", "restore it from a backup: it holds the last version") from None
