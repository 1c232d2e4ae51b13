"""MLflow as the archive of reports: what a version was made of, the report of each night, and all nights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from nightshift.adapters import mlflow_registry as registry
from nightshift.adapters import mlflow_tracking as tracking
from nightshift.adapters import model_versions
from nightshift.adapters.model_versions import PipelineRun, Version
from nightshift.errors import RegistryError
from nightshift.interrupts import deferred
from nightshift.statistics.intervals import Rate
from nightshift.statistics.paired import Cell

REPORTS = "report"
"""Folder of a pipeline's run: <stamp>.html, and <stamp>.json with what the page of all nights shows of it."""
_EVALUATION = "evaluation"


class KeptFilm(NamedTuple):
    success: bool
    video: bytes
    """MP4"""
    strip: bytes
    """JPEG of stills"""


@dataclass(frozen=True, kw_only=True)
class VersionRecord:
    """A registered version: its result, and what it was made of."""

    version: str
    solved: Mapping[Cell, bool]
    """By task and init state of the grid that was asked for; empty if the code that was asked for has not played it."""
    rate: Rate | None
    """On that grid; of its newest evaluation if it has not played it."""
    weights: str
    """sha256"""
    commit: str
    dataset_md5: str
    params: Mapping[str, str]
    """By dotted name; empty where its pipeline run is gone."""
    films: Mapping[Cell, KeptFilm]


@dataclass(frozen=True, kw_only=True)
class NightRun:
    """A run of the pipeline in MLflow, with its reports by stamp: one for every night that worked on these params."""

    run: PipelineRun
    reports: Mapping[str, Mapping[str, Any]]
    version: Version | None
    """That it registered."""


def champion_before(root: Path, model: str, version: str, champion: str) -> str:
    """The version that was champion when `version` was registered, given who is now; empty if there was none."""
    if version != champion:
        return champion
    found = _find(root, model, version)
    return found.previous if found else ""


def version_record(root: Path, model: str, version: str, grid: str, code: str) -> VersionRecord | None:
    """None where the registry does not have the version any more."""
    found = _find(root, model, version)
    if found is None:
        return None
    solved = model_versions.outcomes(root, found, grid, code)
    return VersionRecord(
        version=found.version,
        solved=solved,
        rate=Rate(sum(solved.values()), len(solved)) if solved else found.result,
        weights=found.weights,
        commit=found.commit,
        dataset_md5=found.dataset,
        params=model_versions.params_of(root, found),
        films=_films(tracking.connect(root), found.run_id, found.candidate),
    )


def _find(root: Path, model: str, version: str) -> Version | None:
    try:
        return model_versions.find(root, model, version)
    except (RegistryError, MlflowException):
        return None


@deferred()
def keep(root: Path, run_id: str, stamp: str, page: Path, row: Mapping[str, Any]) -> None:
    """Add a report to the run of its pipeline."""
    client = tracking.connect(root)
    with TemporaryDirectory() as scratch:
        named = Path(scratch) / f"{stamp}.html"
        named.write_bytes(page.read_bytes())
        client.log_artifact(run_id, str(named), REPORTS)
    client.log_dict(run_id, dict(row), f"{REPORTS}/{stamp}.json")


def nights(root: Path, pages: Path) -> list[NightRun]:
    """Every run of a pipeline, newest first; the pages of their reports are copied into the folder `pages`."""
    client = tracking.connect(root)
    registry.use(client)
    versions = model_versions.made_by_runs(root)
    return [
        NightRun(run=run, reports=_fetch_reports(client, run.run_id, pages), version=versions.get(run.run_id))
        for run in model_versions.runs(root, model_versions.EVERY)
    ]


def _fetch_reports(client: MlflowClient, run_id: str, pages: Path) -> dict[str, Mapping[str, Any]]:
    """By stamp; empty where the run has none, or its artifacts cannot be read."""
    try:
        names = [Path(file.path) for file in client.list_artifacts(run_id, REPORTS)]
        rows = {}
        for name in sorted(name for name in names if name.suffix == ".json"):
            page = name.with_suffix(".html")
            if page in names:
                rows[name.stem] = registry.read_dict(run_id, name.as_posix())
                (pages / page.name).write_bytes(registry.read_bytes(run_id, page.as_posix()))
    except (MlflowException, OSError, ValueError):
        return {}
    return rows


def _films(client: MlflowClient, run_id: str, candidate: str) -> dict[Cell, KeptFilm]:
    """Those that the version's own evaluation made of it; empty where it made none, or they are gone."""
    try:
        names = [file.path for file in client.list_artifacts(run_id, _EVALUATION)]
        report = f"{_EVALUATION}/evaluation.json"
        films = registry.read_dict(run_id, report).get("films", []) if report in names else []
        return {
            (film["task"], film["init_state"]): KeptFilm(
                film["success"],
                _film(run_id, Path(film["file"])),
                _film(run_id, Path(film["file"]).with_suffix(".jpg")),
            )
            for film in films
            if film["candidate"] == candidate
        }
    except (MlflowException, OSError, ValueError, KeyError):
        return {}


def _film(run_id: str, file: Path) -> bytes:
    return registry.read_bytes(run_id, f"{_EVALUATION}/{file.as_posix()}")
