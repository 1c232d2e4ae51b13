"""Weights with a version, as the learner publishes them and an actor takes them."""

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
    """Named arrays as a safetensors file that tells its version."""

    version: int
    content: bytes

    def arrays(self) -> dict[str, Column]:
        return tensors.from_bytes(self.content)[0]


class Publisher:
    """The newest weights of a run, in one file: a learner that is started again goes on counting from there.

    Versions are given here and only ever grow, also when the learner itself went back to an older checkpoint, so a
    version names one set of weights for good. Threads may share it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / WEIGHTS
        self._newest = _read(self._path)
        self._publishing = threading.Lock()

    @property
    def version(self) -> int:
        return self._newest.version if self._newest else NO_POLICY

    def publish(self, arrays: Mapping[str, Column]) -> int:
        """Make these the newest weights and return their version, which is never given again."""
        with self._publishing:
            version = self.version + 1
            content = tensors.to_bytes(arrays, json.dumps({"version": version}))
            files.write_bytes(self._path, content)
            self._newest = Weights(version, content)
        return version

    def newest(self, newer_than: int = NO_POLICY) -> Weights | None:
        """The newest weights, or None if there are none newer than those."""
        if newer_than > self.version:
            raise StreamError(
                f"an actor has weights of version {newer_than}, and the last published here is {self.version}",
                f"restore {self._path}, or start the actor anew",
            )
        return self._newest if self.version > newer_than else None


def _read(path: Path) -> Weights | None:
    if not path.exists():
        return None
    content = path.read_bytes()
    try:
        return Weights(int(json.loads(tensors.from_bytes(content)[1])["version"]), content)
    except (DataError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged: {error}", "restore it from a backup: versions count from it") from None
