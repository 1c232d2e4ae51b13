"""Where a stage's metrics go. A stage knows `Tracker` only; pipeline/run.py composes the implementations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from nightshift import config, files
from nightshift.errors import DataError

RunKind = Literal["pipeline", "trial", "classifier"]
"""Of a run in MLflow with runs of stages: a run of the pipeline, a trial of a sweep, or a classifier trained apart."""


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
    """One JSON line per call: the plain record that needs no server, and that `replay` brings to one later."""

    def __init__(self, path: Path) -> None:
        """Lines are appended to what an interrupted run left at `path`."""
        self._path = path
        self._last: dict[str, int] = {}
        self._others: list[Any] = []
        for line in files.read_journal(path):
            if "step" in line:
                self._note(line, line["step"])
            else:
                self._others.append(line)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        new = {name: value for name, value in metrics.items() if step > self._last.get(name, -1)}
        if new:
            self._note(new, step)
            files.append_json(self._path, {"step": step, **new})

    def _note(self, metrics: Iterable[str], step: int) -> None:
        self._last.update({name: max(step, self._last.get(name, -1)) for name in metrics})

    def artifact(self, path: Path) -> None:
        """The file stays where it is; its name is recorded."""
        self._append_once({"artifact": path.as_posix()})

    def dataset(self, name: str, digest: str, path: Path) -> None:
        self._append_once({"dataset": {"name": name, "digest": digest, "path": path.as_posix()}})

    def _append_once(self, line: Any) -> None:
        if line not in self._others:
            self._others.append(line)
            files.append_json(self._path, line)


def artifacts(journal: Path, folder: Path) -> list[Path]:
    """The files and folders that a JsonlTracker recorded as artifacts, relative to `folder`, its project."""
    lines = files.read_journal(journal)
    return [_inside(folder, Path(line["artifact"]), journal) for line in lines if "artifact" in line]


def _inside(folder: Path, path: Path, journal: Path) -> Path:
    """DataError for a path that leads out of the folder: a journal from another machine may name any file of this."""
    if path.is_absolute() or not (folder / path).resolve().is_relative_to(folder.resolve()):
        raise DataError(f"{journal} names the artifact {path}, which is outside {folder}", f"remove the line of {path}")
    return path


def replay(journal: Path, tracker: Tracker, folder: Path, digests: Mapping[str, str]) -> None:
    """Tell a tracker what a JsonlTracker recorded in `folder`; `digests` of datasets by path, where they are known."""
    for line in files.read_journal(journal):
        if "step" in line:
            tracker.log({name: value for name, value in line.items() if name != "step"}, line["step"])
        elif "artifact" in line:
            tracker.artifact(folder / _inside(folder, Path(line["artifact"]), journal))
        else:
            used = line["dataset"]
            tracker.dataset(used["name"], digests.get(used["path"], used["digest"]), Path(used["path"]))


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


WITHOUT_EFFECT = ("machine", "nightly", "notify")
"""Sections of params.yaml that change no result."""


class Change(NamedTuple):
    """A parameter with two values. Example: Change("sft.steps", "300", "500")"""

    name: str
    before: str
    now: str


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[Change]:
    """Params that differ, by dotted name; how a run is run on its machine does not count."""
    names = [name for name in sorted(before.keys() | now.keys()) if name.partition(".")[0] not in WITHOUT_EFFECT]
    found = [Change(name, before.get(name, "none"), now.get(name, "none")) for name in names]
    return [change for change in found if change.before != change.now]


def by_name(params: config.Params) -> dict[str, str]:
    """Every parameter as MLflow keeps it, by dotted name."""
    return {name: str(value) for name, value in flat(params.model_dump(mode="json", by_alias=True)).items()}


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested sections as one mapping by dotted name. Example: {"sft": {"steps": 3}} becomes {"sft.steps": 3}."""
    if not isinstance(value, Mapping):
        return {prefix: value}
    inner = [flat(part, f"{prefix}.{name}" if prefix else str(name)) for name, part in value.items()]
    return {key: leaf for part in inner for key, leaf in part.items()}
