"""Where a stage's numbers go. A stage sees `Tracker` only; what stands behind it is composed outside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from nightshift import files


class Tracker(Protocol):
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics at a step. A step that was recorded before (a resumed run) is not recorded twice."""
        ...

    def artifact(self, path: Path) -> None:
        """Keep a file or folder with the run."""
        ...

    def dataset(self, name: str, digest: str, path: Path) -> None:
        """Say which data the run used: its lineage."""
        ...


class JsonlTracker:
    """One JSON line per step: the plain record that needs no server."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: dict[str, int] = {}
        for line in files.read_journal(path):
            self._last |= dict.fromkeys(line, line["step"])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        new = {key: value for key, value in metrics.items() if step > self._last.get(key, -1)}
        if new:
            self._last |= dict.fromkeys(new, step)
            files.append_json(self._path, {"step": step, **new})

    def artifact(self, path: Path) -> None:
        """Files stay where they are."""

    def dataset(self, name: str, digest: str, path: Path) -> None:
        """The lineage is in dvc.lock."""


class Tee:
    """Tells every tracker the same."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for tracker in self._trackers:
            tracker.log(metrics, step)

    def artifact(self, path: Path) -> None:
        for tracker in self._trackers:
            tracker.artifact(path)

    def dataset(self, name: str, digest: str, path: Path) -> None:
        for tracker in self._trackers:
            tracker.dataset(name, digest, path)
