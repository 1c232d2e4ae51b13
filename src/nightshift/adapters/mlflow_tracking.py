"""MLflow as the record of runs: one parent run per set of params, one child per stage, resumed rather than doubled.

With mlflow_registry.py, mlflow_reports.py and policy_model.py the only files that import mlflow.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlflow.data.dataset_source import DatasetSource
from mlflow.data.meta_dataset import MetaDataset
from mlflow.entities import DatasetInput, InputTag, Metric, Param, Run
from mlflow.exceptions import MlflowException
from mlflow.store.entities import PagedList
from mlflow.tracking import MlflowClient
from mlflow.utils.time import get_current_time_millis

from nightshift import config
from nightshift.adapters.tracking import flat
from nightshift.errors import RegistryError
from nightshift.project import paths
from nightshift.project.environment import MLFLOW_PAGES

EXPERIMENT = "nightshift"
FINGERPRINT = "nightshift.fingerprint"
PIPELINE = "nightshift.pipeline"
STAGE = "nightshift.stage"
FOLDER = "nightshift.folder"
COMMIT = "nightshift.commit"
PARENT = "mlflow.parentRunId"


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

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        new = {key: value for key, value in metrics.items() if step > self._last.get(key, -1)}
        now = get_current_time_millis()
        if new:
            entries = [Metric(key, float(value), now, step) for key, value in new.items()]
            self._client.log_batch(self.run_id, metrics=entries)
            self._last.update(dict.fromkeys(new, step))

    def artifact(self, path: Path) -> None:
        if path.is_dir():
            self._client.log_artifacts(self.run_id, str(path), path.name)
        else:
            self._client.log_artifact(self.run_id, str(path))

    def dataset(self, name: str, digest: str, path: Path) -> None:
        dataset = MetaDataset(DvcSource(path.as_posix(), digest, self._commit), name=name, digest=digest[:36])
        entry = DatasetInput(dataset=dataset._to_mlflow_entity(), tags=[InputTag("mlflow.data.context", "training")])
        self._client.log_inputs(self.run_id, datasets=[entry])

    def tag(self, tags: Mapping[str, str]) -> None:
        for name, value in tags.items():
            self._client.set_tag(self.run_id, name, value)


class Tracking:
    """The parent run of one pipeline, joined by every process that works on the same params."""

    def __init__(self, root: Path, params: config.Params, commit: str) -> None:
        self._folder = f"{socket.gethostname()}:{root}"
        self._commit = commit
        self.client = connect(root)
        self.experiment_id = _experiment(self.client, root)
        self.parent_id = self._open_parent(params)
        self._children: dict[str, str] = {}

    @contextmanager
    def stage(self, stage: str, fingerprint: str, params: Mapping[str, Any]) -> Iterator[MlflowTracker]:
        """The stage's run: the unfinished one of the same fingerprint if there is one, else a new one."""
        run = self._open_child(stage, fingerprint)
        self._children[stage] = run.info.run_id
        logged = [Param(key, str(value)) for key, value in flat(params).items() if key not in run.data.params]
        self.client.log_batch(run.info.run_id, params=logged)
        try:
            yield MlflowTracker(self.client, run, self._commit)
        except BaseException as error:
            status = "FAILED" if isinstance(error, Exception) else "KILLED"
            self.client.set_terminated(run.info.run_id, status)
            raise
        self.client.set_terminated(run.info.run_id, "FINISHED")

    def page(self, stage: str = "") -> str:
        """Where `nightshift ui` shows a stage's run, or the pipeline's."""
        return f"{MLFLOW_PAGES}/#/experiments/{self.experiment_id}/runs/{self._children.get(stage, self.parent_id)}"

    def close(self, status: str) -> None:
        self.client.set_terminated(self.parent_id, status)

    def _open_parent(self, params: config.Params) -> str:
        digest = pipeline_digest(params)
        found = self._newest(f"tags.`{PIPELINE}` = '{digest}' and tags.`{STAGE}` = 'pipeline'")
        if found:
            self.client.update_run(found.info.run_id, status="RUNNING")
            return str(found.info.run_id)
        tags = {PIPELINE: digest, STAGE: "pipeline", FOLDER: self._folder, COMMIT: self._commit}
        run = self.client.create_run(self.experiment_id, run_name=f"pipeline-{digest[:8]}", tags=tags)
        values = flat(params.model_dump(mode="json", by_alias=True))
        self.client.log_batch(run.info.run_id, params=[Param(key, str(value)) for key, value in values.items()])
        return str(run.info.run_id)

    def _open_child(self, stage: str, fingerprint: str) -> Run:
        found = self._newest(f"tags.`{FINGERPRINT}` = '{fingerprint}' and attributes.status != 'FINISHED'")
        self._close_stale(stage, keep=found.info.run_id if found else "")
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

    def _close_stale(self, stage: str, keep: str) -> None:
        """End the runs of this stage and folder that a kill left RUNNING; the run lock excludes that one is alive."""
        mine = f"tags.`{FOLDER}` = '{self._folder}' and tags.`{STAGE}` = '{stage}' and attributes.status = 'RUNNING'"
        for run in self.client.search_runs([self.experiment_id], mine):
            if run.info.run_id != keep:
                self.client.set_terminated(run.info.run_id, "KILLED")

    def _newest(self, condition: str) -> Run | None:
        order = ["attributes.start_time DESC"]
        found = self.client.search_runs([self.experiment_id], condition, order_by=order, max_results=1)
        return found[0] if found else None


def connect(root: Path) -> MlflowClient:
    """A client of the tracking store; a local SQLite store is made and migrated here, before anything parallel."""
    logging.getLogger("alembic").setLevel(logging.ERROR)
    uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{root / paths.MLFLOW_DATABASE}")
    if uri.startswith("sqlite:///"):
        Path(uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
    try:
        client = MlflowClient(uri)
        client.get_experiment_by_name(EXPERIMENT)
    except (MlflowException, OSError) as error:
        raise RegistryError(f"MLflow's store {uri} does not answer: {error}", "check MLFLOW_TRACKING_URI") from error
    return client


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
    """Of every number that counts: how many workers there are does not."""
    values = params.model_dump(mode="json", by_alias=True, exclude={"machine"})
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _experiment(client: MlflowClient, root: Path) -> str:
    found = client.get_experiment_by_name(EXPERIMENT)
    if found:
        return str(found.experiment_id)
    local = str(client.tracking_uri).startswith("sqlite:")
    location = (root / paths.MLFLOW_ARTIFACTS).as_uri() if local else None
    return str(client.create_experiment(EXPERIMENT, artifact_location=location))


def _last_step(client: MlflowClient, run_id: str, key: str) -> int:
    return max((metric.step for metric in client.get_metric_history(run_id, key)), default=-1)
