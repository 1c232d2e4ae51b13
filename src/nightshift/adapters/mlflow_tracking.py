"""MLflow as the record of runs: one parent per run of the pipeline, one child per stage, resumed rather than doubled.

A parent belongs to one set of params, code and imports, and has each stage once. With mlflow_registry.py,
mlflow_registration.py, mlflow_reports.py, model_versions.py, evaluated.py and policy_model.py the only files that
import mlflow.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

import requests
from mlflow.data.dataset_source import DatasetSource
from mlflow.data.meta_dataset import MetaDataset
from mlflow.entities import DatasetInput, InputTag, Metric, Param, Run
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED, UNAUTHENTICATED, ErrorCode
from mlflow.store.db.db_types import MSSQL, MYSQL, POSTGRES
from mlflow.store.entities import PagedList
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from mlflow.tracking import MlflowClient
from mlflow.utils.time import get_current_time_millis
from requests.exceptions import RequestException, Timeout

from nightshift import config, files
from nightshift.adapters import tracking
from nightshift.adapters.tracking import RunKind, flat
from nightshift.errors import NightshiftError, ProjectError, RegistryError, Unreachable
from nightshift.interrupts import deferred
from nightshift.project import paths
from nightshift.project.environment import TRACKING_URI, mlflow_pages, without_password

EXPERIMENT = "nightshift"
FINGERPRINT = "nightshift.fingerprint"
PIPELINE = "nightshift.pipeline"
STAGE = "nightshift.stage"
"""Of a child its stage; of a parent its RunKind."""
FOLDER = "nightshift.folder"
COMMIT = "nightshift.commit"
CODE = "nightshift.code"
"""Digest of code, versions of packages and imports."""
CHANGED = "nightshift.changed"
"""Params of a parent run that differ from those of the one before it."""
CACHED = "nightshift.cached"
"""Prefix of the tags of a parent run that name the runs of stages that it did not run again."""
PARENT = "mlflow.parentRunId"
NOTE = "mlflow.note.content"
_SECONDS_TO_ANSWER = 15.0
"""Within which a server says that it is there."""
EXPERIMENT_KIND = {"mlflow.experimentKind": "custom_model_development"}
"""Opens the experiment in MLflow's view for models instead of the one for prompts."""
_LONGEST_TAG = 5000
_SECONDS_FOR_SYSTEM_METRICS = 3.0
_TELL_TWICE = ("mlflow.store.db.utils", "mlflow.system_metrics")
"""Loggers of MLflow that print an outage of the store, with its SQL, which our sentence is about."""
_DATABASES = (POSTGRES, MYSQL, MSSQL)


class DvcSource(DatasetSource):  # type: ignore[misc]
    """A folder that DVC versions."""

    def __init__(self, path: str, digest: str, revision: str) -> None:
        self._fields = {"path": path, "digest": digest, "revision": revision}

    @staticmethod
    def _get_source_type() -> str:
        return "dvc"

    def load(self, **_: Any) -> str:
        """The folder itself; `dvc checkout` at the revision brings it back."""
        return self._fields["path"]

    @staticmethod
    def _can_resolve(raw_source: Any) -> bool:
        return False

    @classmethod
    def _resolve(cls, raw_source: Any) -> DvcSource:
        raise NotImplementedError("made by its constructor only")

    def to_dict(self) -> dict[str, str]:
        return dict(self._fields)

    @classmethod
    def from_dict(cls, source_dict: Mapping[str, str]) -> DvcSource:
        return cls(**source_dict)


class MlflowTracker:
    """One stage's run. Implements nightshift.adapters.tracking.Tracker."""

    def __init__(self, client: MlflowClient, run: Run, commit: str) -> None:
        self.run_id: str = run.info.run_id
        self._client = client
        self._commit = commit
        self._last = {key: _last_step(client, self.run_id, key) for key in run.data.metrics}

    @deferred()
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        new = {key: value for key, value in metrics.items() if step > self._last.get(key, -1)}
        now = get_current_time_millis()
        if new:
            entries = [Metric(key, float(value), now, step) for key, value in new.items()]
            self._client.log_batch(self.run_id, metrics=entries)
            self._last.update(dict.fromkeys(new, step))

    @deferred()
    def artifact(self, path: Path) -> None:
        if path.is_dir():
            self._client.log_artifacts(self.run_id, str(path), path.name)
        else:
            self._client.log_artifact(self.run_id, str(path))

    @deferred()
    def dataset(self, name: str, digest: str, path: Path) -> None:
        dataset = MetaDataset(DvcSource(path.as_posix(), digest, self._commit), name=name, digest=digest[:36])
        entry = DatasetInput(dataset=dataset._to_mlflow_entity(), tags=[InputTag("mlflow.data.context", "training")])
        self._client.log_inputs(self.run_id, datasets=[entry])

    @deferred()
    def tag(self, tags: Mapping[str, str]) -> None:
        for name, value in tags.items():
            self._client.set_tag(self.run_id, name, value)


class Tracking:
    """The parent run of one pipeline, joined by every process that works on the same params, code and imports.

    Make one only while holding the run lock: what else is RUNNING in this folder is taken for dead.
    """

    def __init__(
        self, root: Path, params: config.Params, commit: str, code: str, kind: RunKind = "pipeline", title: str = ""
    ) -> None:
        """A parent that is made here has this title; without one, the suite, the algorithms and the time."""
        self._kind = kind
        self._title = title or _title(params)
        self._folder = folder_tag(root)
        self._root = root
        self._params = params
        self._commit = commit
        self._code = code
        self._opened = ""
        self._is_guest = False
        """Whether the parent is a run of another kind, which ends as its own process says."""
        self.client = connect(root)
        self.experiment_id = _experiment(self.client, root)
        self._end_leftovers()
        self._children: dict[str, str] = {}

    @contextmanager
    def stage(self, stage: str, fingerprint: str, params: Mapping[str, Any]) -> Iterator[MlflowTracker]:
        """The stage's run: the unfinished one of this folder with the same fingerprint if there is one, else a new one.

        One of another folder may be alive, and its checkpoints are there."""
        with self._explaining_outage():
            run = self._begin(stage, fingerprint, params)
            try:
                with _system_metrics(run.info.run_id, self.client.tracking_uri):
                    yield MlflowTracker(self.client, run, self._commit)
            except BaseException as error:
                self._end(run.info.run_id, "FAILED" if isinstance(error, Exception) else "KILLED")
                raise
            with deferred():
                self.client.set_terminated(run.info.run_id, "FINISHED")

    def _begin(self, stage: str, fingerprint: str, params: Mapping[str, Any]) -> Run:
        self._opened = self._opened or self._join(stage) or self._create()
        run = self._open_child(stage, fingerprint)
        self._children[stage] = run.info.run_id
        logged = [Param(key, str(value)) for key, value in flat(params).items() if key not in run.data.params]
        with deferred():
            self.client.log_batch(run.info.run_id, params=logged)
        return run

    @contextmanager
    def _explaining_outage(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if sentence := explained(error, self.client.tracking_uri):
                raise sentence from error
            raise

    @property
    def parent_id(self) -> str:
        """The run of the pipeline; a new one unless one of its stages was tracked before."""
        self._opened = self._opened or self._create()
        return self._opened

    def page(self, stage: str = "") -> str:
        """Where `nightshift ui` shows a stage's run, or the pipeline's."""
        return f"{mlflow_pages()}/#/experiments/{self.experiment_id}/runs/{self._children.get(stage, self.parent_id)}"

    @deferred()
    def publish(self, metrics: Mapping[str, float], tags: Mapping[str, str], note: str) -> None:
        """Results of the pipeline, on its run."""
        now = get_current_time_millis()
        entries = [Metric(key, float(value), now, 0) for key, value in metrics.items()]
        self.client.log_batch(self.parent_id, metrics=entries)
        for name, value in {**tags, NOTE: note}.items():
            self.client.set_tag(self.parent_id, name, value[:_LONGEST_TAG])

    @deferred()
    def link_cached(self, fingerprints: Mapping[str, str]) -> dict[str, str]:
        """Name the runs that made the results of stages that were not run again; returns them by stage."""
        found = {}
        for stage, fingerprint in fingerprints.items():
            made = self._newest(f"tags.`{FINGERPRINT}` = '{fingerprint}' and attributes.status = 'FINISHED'")
            if made:
                found[stage] = str(made.info.run_id)
                self.client.set_tag(self.parent_id, f"{CACHED}.{stage}", found[stage])
        return found

    @property
    def ran(self) -> Mapping[str, str]:
        """Runs of the stages of this parent, by stage: those of this process and of others that joined it."""
        mine = f"tags.`{PARENT}` = '{self.parent_id}' and attributes.status != 'KILLED'"
        runs = _every_page(lambda token: self.client.search_runs([self.experiment_id], mine, page_token=token))
        return {run.data.tags[STAGE]: run.info.run_id for run in runs if STAGE in run.data.tags}

    @deferred()
    def close(self, status: str) -> None:
        """End the run of the pipeline; dvc.lock, which names all that it made, stays with it."""
        if not self._opened or self._is_guest:
            return
        with self._tolerating_outage():
            if (self._root / paths.DVC_LOCK).exists():
                self.client.log_artifact(self._opened, str(self._root / paths.DVC_LOCK))
        self._end(self._opened, status)

    @deferred()
    def _end(self, run_id: str, status: str) -> None:
        with self._tolerating_outage():
            self.client.set_terminated(run_id, status)

    @contextmanager
    def _tolerating_outage(self) -> Iterator[None]:
        """If MLflow does not answer or its disk is full, the next run ends what is left (`_end_leftovers`)."""
        try:
            yield
        except (MlflowException, OSError) as error:
            if not explained(error, self.client.tracking_uri):
                raise

    @deferred()
    def _join(self, stage: str) -> str:
        """The run that another process began with the same params, code and imports, if it lacks this stage."""
        digest = pipeline_digest(self._params)
        wanted = {PIPELINE: digest, CODE: self._code, FOLDER: self._folder}
        same = " and ".join(f"tags.`{tag}` = '{value}'" for tag, value in wanted.items())
        kinds = dict.fromkeys(["pipeline", self._kind])
        begun = [run for kind in kinds if (run := self._newest(f"{same} and tags.`{STAGE}` = '{kind}'"))]
        if not begun or self._has_finished(begun[0], stage):
            return ""
        self._is_guest = begun[0].data.tags[STAGE] != self._kind
        if not self._is_guest:
            self.client.update_run(begun[0].info.run_id, status="RUNNING")
        return str(begun[0].info.run_id)

    def _has_finished(self, parent: Run, stage: str) -> bool:
        done = f"tags.`{PARENT}` = '{parent.info.run_id}' and tags.`{STAGE}` = '{stage}'"
        return self._newest(f"{done} and attributes.status = 'FINISHED'") is not None

    @deferred()
    def _create(self) -> str:
        tags = {
            PIPELINE: pipeline_digest(self._params),
            CODE: self._code,
            STAGE: self._kind,
            FOLDER: self._folder,
            COMMIT: self._commit,
        }
        values = tracking.by_name(self._params)
        before = self._newest(f"tags.`{STAGE}` = '{self._kind}' and tags.`{FOLDER}` = '{self._folder}'")
        if before:
            tags[CHANGED] = "; ".join(changes(before.data.params, values))[:_LONGEST_TAG] or "nothing"
        run = self.client.create_run(self.experiment_id, run_name=self._title, tags=tags)
        self.client.log_batch(run.info.run_id, params=[Param(key, value) for key, value in values.items()])
        if (self._root / paths.PARAMS).exists():
            self.client.log_artifact(run.info.run_id, str(self._root / paths.PARAMS))
        return str(run.info.run_id)

    @deferred()
    def _open_child(self, stage: str, fingerprint: str) -> Run:
        unfinished = f"tags.`{FINGERPRINT}` = '{fingerprint}' and attributes.status != 'FINISHED'"
        found = self._newest(f"{unfinished} and tags.`{FOLDER}` = '{self._folder}'")
        tags = {
            FINGERPRINT: fingerprint,
            STAGE: stage,
            FOLDER: self._folder,
            COMMIT: self._commit,
            PARENT: self.parent_id,
        }
        if not found:
            return self.client.create_run(self.experiment_id, run_name=stage, tags=tags)
        self.client.update_run(found.info.run_id, status="RUNNING")
        self.client.set_tag(found.info.run_id, PARENT, self.parent_id)
        return self.client.get_run(found.info.run_id)

    @deferred()
    def _end_leftovers(self) -> None:
        """Runs of this folder that a kill left RUNNING become KILLED; the run lock excludes that one is alive."""
        mine = f"tags.`{FOLDER}` = '{self._folder}' and attributes.status = 'RUNNING'"
        for run in list(_runs(self.client, mine)):
            self.client.set_terminated(run.info.run_id, "KILLED")

    def _newest(self, condition: str) -> Run | None:
        order = ["attributes.start_time DESC"]
        found = self.client.search_runs([self.experiment_id], condition, order_by=order, max_results=1)
        return found[0] if found else None


@contextmanager
def _system_metrics(run_id: str, uri: str) -> Iterator[None]:
    """CPU, memory, disk, network and (by pynvml) GPUs of the machine, as `system/…` of the run while the block lasts.

    A store that does not answer must not hold up the end of the stage, so its last words are waited for briefly.
    """
    monitor = SystemMetricsMonitor(run_id, resume_logging=True, tracking_uri=uri)
    monitor.start()
    try:
        yield
    finally:
        ending = threading.Thread(target=monitor.finish, daemon=True)
        ending.start()
        ending.join(_SECONDS_FOR_SYSTEM_METRICS)


def connect(root: Path) -> MlflowClient:
    """A client of the tracking store; a local SQLite store is made and migrated here, before anything parallel."""
    logging.getLogger("alembic").setLevel(logging.ERROR)
    for name in _TELL_TWICE:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    uri = os.environ.get(TRACKING_URI, f"sqlite:///{root / paths.MLFLOW_DATABASE}")
    _refuse_database(uri)
    database = Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None
    if database:
        database.parent.mkdir(parents=True, exist_ok=True)
        database.touch(mode=0o600)
    try:
        if database == root.resolve() / paths.MLFLOW_DATABASE:
            _follow_move(database, root.resolve())
        _check_answer(uri)
        client = MlflowClient(uri)
        client.get_experiment_by_name(EXPERIMENT)
    except (MlflowException, OSError, sqlite3.Error) as error:
        shown = without_password(uri)
        raise (
            explained(error, uri)
            or RegistryError(f"MLflow's store {shown} cannot be used: {error}", "check MLFLOW_TRACKING_URI")
        ) from error
    return client


def _check_answer(uri: str) -> None:
    """Raise Timeout if a server accepts connections and does not answer: MLflow's client would wait for minutes. Other
    errors are left to that client, which retries."""
    if uri.startswith("http"):
        try:
            requests.get(f"{uri.rstrip('/')}/health", timeout=_SECONDS_TO_ANSWER)
        except Timeout:
            raise
        except RequestException:
            return


def prepare(root: Path) -> None:
    """Make the store and our experiment in it, before clones of the project use them all at once: the first of them
    would have the artifacts of all in its own folder."""
    _experiment(connect(root), root)


_LOCATIONS = {
    "experiments": ("artifact_location",),
    "runs": ("artifact_uri",),
    "model_versions": ("source", "storage_location"),
    "logged_models": ("artifact_location",),
}
"""Columns of MLflow's tables with absolute addresses of artifacts."""


def _follow_move(database: Path, root: Path) -> None:
    """Let the addresses in a project's own store name the folder it is in now: MLflow keeps absolute ones, and a copy
    of the project would read and write the artifacts of its original. Its runs are those of the new folder, too."""
    artifacts = (root / paths.MLFLOW_ARTIFACTS).as_uri()
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not tables.issuperset(_LOCATIONS):
            return
        named = "SELECT artifact_location FROM experiments WHERE name = ?"
        old = next((location for (location,) in connection.execute(named, [EXPERIMENT])), artifacts)
        if old == artifacts:
            return
        for table, columns in _LOCATIONS.items():
            for column in columns:
                change = f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE {column} LIKE ? || '%'"
                connection.execute(change, [artifacts, len(old) + 1, old])
        if (before := _root_of(old)) is not None:
            place = "substr(value, instr(value, ':') + 1)"  # after the name of the machine
            move = f"UPDATE tags SET value = ? || substr({place}, ?) WHERE key = ? AND substr({place}, 1, ?) IN (?, ?)"
            start = len(str(before)) + 1
            connection.execute(move, [folder_tag(root), start, FOLDER, start, str(before), f"{before}/"])


def _root_of(artifacts: str) -> Path | None:
    """The project whose artifacts have this address; None if it is no place in a project."""
    path = Path(url2pathname(urlparse(artifacts).path))
    if not artifacts.startswith("file:") or not path.match(str(paths.MLFLOW_ARTIFACTS)):
        return None
    return path.parents[len(paths.MLFLOW_ARTIFACTS.parts) - 1]


def folder_tag(root: Path) -> str:
    """What tells the runs of a project from those of others in the same store. It has no quote: MLflow's filters do."""
    return f"{socket.gethostname()}:{root.resolve()}".replace("'", "%27")


def _refuse_database(uri: str) -> None:
    """A database is for an MLflow server: a client that writes to it directly keeps its artifacts where no other client
    finds them, and tries to connect for minutes."""
    if re.split("[+:]", uri, maxsplit=1)[0] in _DATABASES:
        raise RegistryError(
            f"{TRACKING_URI} names a database, {without_password(uri)}, and not a server",
            "start an MLflow server on it and name that (docs/production.md)",
        )


_DISK_FULL = "database or disk is full"
_LOCKED = "database is locked"
_REFUSALS = {
    ErrorCode.Name(UNAUTHENTICATED): "refuses user and password",
    ErrorCode.Name(PERMISSION_DENIED): "does not permit its user to do this",
}


def explained(error: BaseException, uri: str) -> NightshiftError | None:
    """The sentence for a disk that is full or a store that refuses or does not answer; None for any other error."""
    if isinstance(error, OSError) and error.errno in files.DISK_FULL:
        return files.refusal(error)  # a stage may have filled another disk than the one of the store
    if _DISK_FULL in str(error):
        return ProjectError(
            f"no space left on the disk that holds {without_password(uri)}", "free some space and run again: it resumes"
        )
    if _LOCKED in str(error):
        return Unreachable(
            f"another process keeps MLflow's store {without_password(uri)} locked",
            "end it, and run again: what is done is kept",
        )
    if isinstance(error, MlflowException) and error.error_code in _REFUSALS:
        return RegistryError(
            f"MLflow at {without_password(uri)} {_REFUSALS[error.error_code]}",
            "check MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (docs/production.md), and run again: what is "
            "done is kept",
        )
    if not isinstance(error, RequestException) and not str(error).startswith("API request to http"):
        return None
    return Unreachable(
        f"MLflow at {without_password(uri)} does not answer",
        "start it, or check MLFLOW_TRACKING_URI, and run again: what is done is kept",
    )


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Params that differ, in words; how a run is run on its machine does not count.

    Example: changes({"sft.steps": "300"}, {"sft.steps": "500"}) == ["sft.steps 300 → 500"]
    """
    return [f"{name} {old} → {new}" for name, old, new in tracking.changes(before, after)]


def _title(params: config.Params) -> str:
    """Example: "libero_mini rloo 2026-01-31 02:00" """
    trained = "+".join(params.algorithms) or "clone"
    return f"{params.env.suite} {trained} {datetime.now().strftime('%Y-%m-%d %H:%M')}"


def download(root: Path, run_id: str, name: Path, folder: Path) -> bool:
    """Copy an artifact of a run into a folder; False if the run has none of this name."""
    client = connect(root)
    try:
        if name.as_posix() not in [file.path for file in client.list_artifacts(run_id)]:
            return False
        client.download_artifacts(run_id, name.as_posix(), str(folder))
    except (MlflowException, OSError) as error:
        raise RegistryError(f"{name} of the run {run_id} cannot be read: {error}", "nightshift runs") from error
    return True


def unfinished_fingerprints(client: MlflowClient) -> set[str]:
    """Of stages whose run did not finish: they may be resumed."""
    runs = _runs(client, "attributes.status != 'FINISHED'")
    return {run.data.tags[FINGERPRINT] for run in runs if FINGERPRINT in run.data.tags}


def _runs(client: MlflowClient, condition: str) -> Iterator[Run]:
    experiment = client.get_experiment_by_name(EXPERIMENT)
    if experiment:
        yield from _every_page(
            lambda token: client.search_runs([experiment.experiment_id], condition, page_token=token)
        )


def _every_page(search: Callable[[str | None], PagedList]) -> Iterator[Any]:
    """MLflow answers searches in pages."""
    token = None
    while True:
        page = search(token)
        yield from page
        token = page.token
        if not token:
            return


def pipeline_digest(params: config.Params) -> str:
    """Digest of the params that may change a result: all sections but `tracking.WITHOUT_EFFECT`."""
    values = params.model_dump(mode="json", by_alias=True, exclude=set(tracking.WITHOUT_EFFECT))
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _experiment(client: MlflowClient, root: Path) -> str:
    found = client.get_experiment_by_name(EXPERIMENT)
    if found:
        return str(found.experiment_id)
    local = str(client.tracking_uri).startswith("sqlite:")
    location = (root / paths.MLFLOW_ARTIFACTS).as_uri() if local else None
    return str(client.create_experiment(EXPERIMENT, artifact_location=location, tags=EXPERIMENT_KIND))


def _last_step(client: MlflowClient, run_id: str, key: str) -> int:
    return max((metric.step for metric in client.get_metric_history(run_id, key)), default=-1)
