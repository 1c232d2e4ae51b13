"""Versioned policy weights: published by the learner, fetched by actors."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nightshift import files
from nightshift.closing import Closing
from nightshift.data import tensors
from nightshift.data.episode import NO_POLICY
from nightshift.data.tensors import DTYPES, Column
from nightshift.errors import DataError, StreamError
from nightshift.project.locks import Claim

WEIGHTS = "weights.safetensors"
MAX_BYTES = 64 * 2**30
"""Arrays up to this size in all can be published."""
MAX_FILE_BYTES = MAX_BYTES + 2**28
"""The same with the header of the file."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The bytes of a safetensors file with named arrays; its header holds the version."""

    version: int
    content: bytes

    def arrays(self) -> dict[str, Column]:
        return tensors.from_bytes(self.content)[0]


class WeightPublisher(Closing):
    """Keeps the latest weights of a run in one file, from which a restarted learner continues to count versions.

    Versions only grow, even if the learner resumes from an older checkpoint, so a version identifies one set of
    weights. Thread-safe; one process at a time may open the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._claim = Claim(folder, StreamError)
        files.sweep_temporaries(folder)
        self._path = folder / WEIGHTS
        self._latest = _read(self._path)
        self._publishing = threading.Lock()

    @property
    def version(self) -> int:
        return self._latest.version if self._latest else NO_POLICY

    def publish(self, arrays: Mapping[str, Column]) -> int:
        """Publish these weights and return their version, which is never reused."""
        _check(arrays)
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

    def close(self) -> None:
        self._claim.release()


def _check(arrays: Mapping[str, Column]) -> None:
    """Refuse at once what cannot travel."""
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.dtype.name not in DTYPES:
            kind = getattr(array, "dtype", type(array).__name__)
            raise DataError(
                f"the weights {name} are {kind}; numpy arrays of {', '.join(DTYPES)} can be published",
                "convert them first: tensor.float().numpy(force=True) of a torch tensor",
            )
    size = sum(array.nbytes for array in arrays.values())
    if size > MAX_BYTES:
        largest = max(arrays, key=lambda name: arrays[name].nbytes)
        raise DataError(
            f"the weights have {size} bytes and {MAX_BYTES} can travel; the largest array is {largest} "
            f"with {arrays[largest].nbytes}",
            "publish only the weights that actors need",
        )


def _read(path: Path) -> Weights | None:
    if not path.exists():
        return None
    content = path.read_bytes()
    try:
        return Weights(int(json.loads(tensors.from_bytes(content)[1])["version"]), content)
    except (DataError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged: {error}", "restore it from a backup: it holds the last version") from None
