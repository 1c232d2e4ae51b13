"""Where a stage's metrics go. A stage knows `Tracker` only; pipeline/run.py composes the implementations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from nightshift import files


class Tracker(Protocol):
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics at a step. A metric that has this step already (a resumed run) is not recorded again."""
        ...

    def artifact(self, path: Path) -> None:
        """Keep a file or folder with the run."""
        ...

    def dataset(self, name: str, digest: str, path: Path) -> None:
        """Say which data the run used: its lineage."""
        ...


class JsonlTracker:
    """One JSON line per call of `log`: the plain record that needs no server."""

    def __init__(self, path: Path) -> None:
        """Lines are appended to what an interrupted run left at `path`."""
        self._path = path
        self._last: dict[str, int] = {}
        for line in files.read_journal(path):
            self._note(line, line["step"])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        new = {name: value for name, value in metrics.items() if step > self._last.get(name, -1)}
        if new:
            self._note(new, step)
            files.append_json(self._path, {"step": step, **new})

    def _note(self, metrics: Iterable[str], step: int) -> None:
        self._last.update({name: max(step, self._last.get(name, -1)) for name in metrics})

    def artifact(self, path: Path) -> None:
        """Files stay where they are."""

    def dataset(self, name: str, digest: str, path: Path) -> None:
        """The lineage is in dvc.lock."""


class Tee:
    """Passes everything on to several trackers."""

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
