"""MLflow as the registry of policies: `challenger` is the newest, `champion` the best that was shown to be better.

Here it is read, and aliases are moved; mlflow_registration.py adds to it. Every version keeps its per-episode outcomes
in its run, one file per evaluation grid, so that later versions can be compared with it state by state.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.models import Model
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode
from mlflow.tracking import MlflowClient

from nightshift import files, policies
from nightshift.adapters import mlflow_tracking as tracking
from nightshift.config import CHAMPION
from nightshift.errors import RegistryError
from nightshift.interrupts import deferred
from nightshift.policies.base import Policy
from nightshift.statistics.paired import EpisodeOutcome

CHALLENGER = "challenger"
DATASET = "dataset.md5"
DATASET_EPISODES = "dataset.episodes"
COMMIT = "code.commit"
POLICY_PACKAGE = "policy.package"
"""The package that adds the family of the policy, its version and code; a family of ours has no such tag."""
STARTED_FROM = "parent.version"
"""The version whose weights training started from."""
CANDIDATE = "candidate"
WEIGHTS = "policy.sha256"
SPEC = "policy.spec_sha256"
GRID = "evaluation.grid"
SUCCESSES = "evaluation.successes"
EPISODES = "evaluation.episodes"
INVALID = "evaluation.invalid"
INTERVAL = "evaluation.interval"
LEVEL = "gate.level"
BAR = "gate.min_success_rate"
MARGIN = "gate.max_task_drop"
WITHDRAWN = "gate.withdrawn"
"""When the version was taken back as champion by hand."""
P_VALUE = "gate.p_value"
NOT_TESTED = "not tested"
REASON = "gate.reason"
VERDICT = "gate.verdict"
PREVIOUS = "champion.previous"
"""The version that was champion before it; empty if there was none."""
RUN = "run_id"
PIPELINE_RUN = "pipeline.run"
OUTCOMES = "outcomes"
"""Folder of a version's run that holds <grid>.json."""


class Champion:
    """The version behind the alias champion."""

    def __init__(self, client: MlflowClient, version: ModelVersion) -> None:
        self.version = str(version.version)
        self._client = client
        self._version = version

    def has_played(self, grid: str) -> bool:
        return outcomes_of(self._client, self._version, grid) is not None

    def policy(self) -> Policy:
        """RegistryError if its weights are not those that were registered."""
        return policies.load(self._folder)

    def copy_policy(self, folder: Path) -> None:
        """Its two files."""
        for name in (policies.SPEC, policies.WEIGHTS):
            shutil.copyfile(self._folder / name, folder / name)

    @cached_property
    def _folder(self) -> Path:
        return _verified_policy(self._version, _download(self._version))


def _download(version: ModelVersion) -> Path:
    """The model as MLflow stores it."""
    with hushed(), _readable(version, "policy"):
        return Path(mlflow.artifacts.download_artifacts(f"models:/{version.name}/{version.version}"))


def _verified_policy(version: ModelVersion, model: Path) -> Path:
    """The folder of the policy in a model; RegistryError if its two files are not those that were registered."""
    with hushed(), _readable(version, "policy"):
        stored: str = Model.load(str(model)).flavors[mlflow.pyfunc.FLAVOR_NAME]["artifacts"]["policy"]["path"]
        found = {name: files.sha256(model / stored / name) for name in (policies.WEIGHTS, policies.SPEC)}
    if SPEC not in version.tags:
        raise RegistryError(
            f"version {version.version} of {version.name} was registered by an older Nightshift, without the sha256 of "
            f"its {policies.SPEC}",
            "delete its alias in MLflow (nightshift ui), and register again: nightshift run --force-stage register",
        )
    for tag, (name, digest) in zip((WEIGHTS, SPEC), found.items(), strict=True):
        if digest != version.tags.get(tag):
            raise RegistryError(
                f"the {name} of version {version.version} of {version.name} is damaged: its sha256 is not the "
                f"registered one ({tag})",
                "nightshift rollback, or nightshift promote another version",
            )
    return model / stored


def champion(root: Path, model: str) -> Champion | None:
    """The version that is champion now."""
    client = connect(root)
    found = champion_version(client, model)
    return Champion(client, found) if found else None


def load(root: Path, model: str, which: str) -> Policy:
    """The policy behind an alias or a version number; RegistryError if it is not the one that was registered.

    The copy of our code that lies beside it in MLflow's store is for programs without this package. It is not run here:
    its sha256 is not registered.
    """
    version = look_up(connect(root), model, which)
    return policies.load(_verified_policy(version, _download(version)))


def connect(root: Path) -> MlflowClient:
    client = tracking.connect(root)
    use(client)
    return client


def use(client: MlflowClient) -> None:
    """Have MLflow's own functions read from the same store."""
    mlflow.set_tracking_uri(client.tracking_uri)


def look_up(client: MlflowClient, model: str, which: str) -> ModelVersion:
    try:
        if which.isdigit():
            return client.get_model_version(model, which)
        return client.get_model_version_by_alias(model, which)
    except MlflowException:
        known = versions(client, model)
        if not known:
            raise RegistryError(f"MLflow has no model {model!r} yet", "nightshift run") from None
        names = [*sorted((str(v.version) for v in known), key=int), *sorted(aliases(client, model))]
        raise RegistryError(f"{model} has no version or alias {which!r}", f"choose one of {', '.join(names)}") from None


def versions(client: MlflowClient, model: str) -> list[ModelVersion]:
    return list(client.search_model_versions(f"name = '{model}'"))


@deferred()
def set_tags(client: MlflowClient, version: ModelVersion, tags: Mapping[str, str]) -> None:
    for key, value in tags.items():
        client.set_model_version_tag(version.name, version.version, key, value)


def outcomes_of(client: MlflowClient, version: ModelVersion, grid: str) -> Sequence[EpisodeOutcome] | None:
    """The version's episodes on a grid; None if it was not evaluated on it."""
    run_id, path = version.tags.get(RUN), f"{OUTCOMES}/{grid}.json"
    with _readable(version, OUTCOMES):
        if not run_id or path not in [file.path for file in client.list_artifacts(run_id, OUTCOMES)]:
            return None
        episodes: Sequence[EpisodeOutcome] = read_dict(run_id, path)["episodes"]
    return episodes


def read_dict(run_id: str, path: str) -> Mapping[str, Any]:
    """A JSON file among the artifacts of a run."""
    with hushed():
        content: Mapping[str, Any] = mlflow.artifacts.load_dict(f"runs:/{run_id}/{path}")
    return content


def read_bytes(run_id: str, path: str) -> bytes:
    """A file among the artifacts of a run."""
    with hushed(), tempfile.TemporaryDirectory() as scratch:
        file = mlflow.artifacts.download_artifacts(run_id=run_id, artifact_path=path, dst_path=scratch)
        return Path(file).read_bytes()


@contextlib.contextmanager
def _readable(version: ModelVersion, what: str) -> Iterator[None]:
    """RegistryError if a part of the version is gone from MLflow's store."""
    try:
        yield
    except (MlflowException, OSError) as error:
        raise RegistryError(
            f"the {what} of version {version.version} of {version.name} cannot be read: {error}",
            "bring its MLflow run back, or delete the version",
        ) from error


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """MLflow reports every step on stderr; errors are still raised."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield


@deferred()
def make_champion(client: MlflowClient, version: ModelVersion, before: ModelVersion | None) -> None:
    """Move the alias; the version remembers whom it replaced, for a rollback."""
    set_tags(client, version, {PREVIOUS: str(before.version) if before else ""})
    client.set_registered_model_alias(version.name, CHAMPION, version.version)


def grids(client: MlflowClient, version: ModelVersion) -> list[str]:
    """Digests of the evaluations that it has played."""
    with _readable(version, OUTCOMES):
        return [Path(file.path).stem for file in client.list_artifacts(version.tags[RUN], OUTCOMES)]


def champion_version(client: MlflowClient, model: str) -> ModelVersion | None:
    return client.get_model_version_by_alias(model, CHAMPION) if CHAMPION in aliases(client, model) else None


def aliases(client: MlflowClient, model: str) -> dict[str, str]:
    """Versions by alias; none if nothing was registered yet."""
    try:
        found = client.get_registered_model(model).aliases
    except MlflowException as error:
        if error.error_code != ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
            raise
        return {}
    return {alias: str(version) for alias, version in found.items()}
