"""MLflow as the archive of reports: what a version was made of, the report of each night, and all nights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import mlflow
from mlflow.entities import Run
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from nightshift.adapters import mlflow_registry as registry
from nightshift.adapters import mlflow_tracking as tracking
from nightshift.interrupts import deferred
from nightshift.statistics.intervals import Rate
from nightshift.statistics.paired import Cell, EpisodeOutcome

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
    rate: Rate | None
    outcomes: Sequence[EpisodeOutcome] | None
    """On the grid that was asked for; None if it was not evaluated on it."""
    commit: str
    dataset_md5: str
    params: Mapping[str, str]
    """By dotted name; empty where its pipeline run is gone."""
    films: Mapping[Cell, KeptFilm]


@dataclass(frozen=True, kw_only=True)
class NightRun:
    """A run of the pipeline in MLflow, with its reports by stamp: one for every night that worked on these params."""

    name: str
    started: float
    """Seconds since 1970."""
    seconds: float | None
    status: str
    commit: str
    reports: Mapping[str, Mapping[str, Any]]
    version: Mapping[str, str] = field(default_factory=dict)
    """Tags of the version that it registered."""


def champion_before(root: Path, model: str, version: str, champion: str) -> str:
    """The version that was champion when `version` was registered, given who is now; empty if there was none."""
    if version != champion:
        return champion
    client = tracking.connect(root)
    try:
        return str(client.get_model_version(model, version).tags.get(registry.PREVIOUS, ""))
    except MlflowException:
        return ""


def version_record(root: Path, model: str, version: str, grid: str) -> VersionRecord | None:
    """None where the registry does not have the version any more."""
    client = tracking.connect(root)
    mlflow.set_tracking_uri(client.tracking_uri)
    try:
        found = client.get_model_version(model, version)
    except MlflowException:
        return None
    candidate = found.tags.get(registry.CANDIDATE, "")
    return VersionRecord(
        version=str(found.version),
        rate=_rate(found),
        outcomes=registry.outcomes_of(client, found, grid),
        commit=found.tags.get("code.commit", ""),
        dataset_md5=found.tags.get("dataset.md5", ""),
        params=_pipeline_params(client, found),
        films=_films(client, found.tags.get(registry.RUN, ""), candidate),
    )


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
    mlflow.set_tracking_uri(client.tracking_uri)
    versions = _versions_by_pipeline_run(client)
    runs = list(tracking._runs(client, f"tags.`{tracking.STAGE}` = 'pipeline'"))
    return [_night(client, run, versions.get(run.info.run_id, {}), pages) for run in runs]


def _night(client: MlflowClient, run: Run, version: Mapping[str, str], pages: Path) -> NightRun:
    info = run.info
    return NightRun(
        name=str(info.run_name),
        started=info.start_time / 1000,
        seconds=(info.end_time - info.start_time) / 1000 if info.end_time else None,
        status=str(info.status),
        commit=run.data.tags.get(tracking.COMMIT, ""),
        reports=_fetch_reports(client, info.run_id, pages),
        version=version,
    )


def _fetch_reports(client: MlflowClient, run_id: str, pages: Path) -> dict[str, Mapping[str, Any]]:
    """By stamp; empty where the run has none, or its artifacts cannot be read."""
    try:
        names = [Path(file.path) for file in client.list_artifacts(run_id, REPORTS)]
        rows = {}
        for name in sorted(name for name in names if name.suffix == ".json"):
            page = name.with_suffix(".html")
            if page in names:
                rows[name.stem] = _read_dict(run_id, name)
                mlflow.artifacts.download_artifacts(run_id=run_id, artifact_path=page.as_posix(), dst_path=str(pages))
    except (MlflowException, OSError, ValueError):
        return {}
    for fetched in (pages / REPORTS).glob("*.html"):
        fetched.replace(pages / fetched.name)
    return rows


def _read_dict(run_id: str, path: Path) -> Mapping[str, Any]:
    with registry._hushed():
        content: Mapping[str, Any] = mlflow.artifacts.load_dict(f"runs:/{run_id}/{path.as_posix()}")
    return content


def _versions_by_pipeline_run(client: MlflowClient) -> dict[str, dict[str, str]]:
    """Tags of the newest version that each pipeline's run registered."""
    found: dict[str, dict[str, str]] = {}
    for version in sorted(client.search_model_versions(), key=lambda v: int(v.version)):
        run = _run(client, version.tags.get(registry.RUN, ""))
        parent = run.data.tags.get(tracking.PARENT) if run else None
        if parent:
            found[parent] = {**version.tags, "version": str(version.version)}
    return found


def _run(client: MlflowClient, run_id: str) -> Run | None:
    try:
        return client.get_run(run_id) if run_id else None
    except MlflowException:
        return None


def _rate(version: ModelVersion) -> Rate | None:
    try:
        return Rate(int(version.tags[registry.SUCCESSES]), int(version.tags[registry.EPISODES]))
    except (KeyError, ValueError):
        return None


def _pipeline_params(client: MlflowClient, version: ModelVersion) -> Mapping[str, str]:
    stage = _run(client, version.tags.get(registry.RUN, ""))
    parent = _run(client, stage.data.tags.get(tracking.PARENT, "")) if stage else None
    return dict(parent.data.params) if parent else {}


def _films(client: MlflowClient, run_id: str, candidate: str) -> dict[Cell, KeptFilm]:
    """Those that the version's own evaluation made of it; empty where it made none, or they are gone."""
    try:
        names = [file.path for file in client.list_artifacts(run_id, _EVALUATION)]
        report = f"{_EVALUATION}/evaluation.json"
        films = _read_dict(run_id, Path(report)).get("films", []) if report in names else []
        return {
            (film["task"], film["init_state"]): KeptFilm(
                film["success"],
                _download(run_id, Path(film["file"])),
                _download(run_id, Path(film["file"]).with_suffix(".jpg")),
            )
            for film in films
            if film["candidate"] == candidate
        }
    except (MlflowException, OSError, ValueError, KeyError):
        return {}


def _download(run_id: str, file: Path) -> bytes:
    with registry._hushed(), TemporaryDirectory() as scratch:
        path = mlflow.artifacts.download_artifacts(
            run_id=run_id, artifact_path=f"{_EVALUATION}/{file.as_posix()}", dst_path=scratch
        )
        return Path(path).read_bytes()
