"""MLflow as the registry of policies: `challenger` is the newest, `champion` the best that was shown to be better.

Here it is read, and aliases are moved; mlflow_registration.py adds to it. Every version keeps its per-episode outcomes
in its run, one file per evaluation grid, so that later versions can be compared with it state by state.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import mlflow
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.models import Model
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode
from mlflow.tracking import MlflowClient
from mlflow.utils.uri import is_local_uri

from nightshift import files, policies
from nightshift.adapters import mlflow_tracking as tracking
from nightshift.config import CHAMPION
from nightshift.errors import RegistryError
from nightshift.interrupts import deferred
from nightshift.policies.base import Policy
from nightshift.project import locks, paths
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
"""sha256 of the policy.safetensors that evaluation plays, also where MLflow stores an adapter."""
SPEC = "policy.spec_sha256"
TRAINED_TAG = "policy.trained_sha256"
BASE_TAG = "policy.base_sha256"
TAGS_OF_WHOLE = {policies.WEIGHTS: WEIGHTS}
TAGS_OF_ADAPTER = {policies.TRAINED: TRAINED_TAG, policies.BASE: BASE_TAG}
"""The files that have the weights of a version, and the tag with the sha256 of each. Merged weights are a whole."""
MERGED_FROM = "policy.merged_from_sha256"
"""Of a version whose adapter was merged: `WEIGHTS` of the policy that was trained."""
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
REPLACED = "champion.replaced"
"""Of a version that became champion again: those that it replaced the times before, separated by spaces."""
RUN = "run_id"
PIPELINE_RUN = "pipeline.run"
CODE = "code"
"""In a file of outcomes: the digest of the code that played them."""
UNKNOWN_CODE = ""
"""Of outcomes from before the digest was kept: they are compared with one another, and with no others."""
OUTCOMES = "outcomes"
"""Folder of a version's run that holds <grid>.json."""


_WEIGHT_FILES = (*TAGS_OF_WHOLE, *TAGS_OF_ADAPTER)


class Champion:
    """The version behind the alias champion. A copy of a remote store's files lasts as long as this object."""

    def __init__(self, root: Path, client: MlflowClient, version: ModelVersion) -> None:
        self.version = str(version.version)
        self._root = root
        self._client = client
        self._version = version

    def has_played(self, grid: str, code: str) -> bool:
        """In an evaluation by this code (`envs.grid.played_by`)."""
        return outcomes_of(self._client, self._version, grid, code) is not None

    def policy(self) -> Policy:
        """RegistryError if its weights are not those that were registered."""
        return policies.load(self._folder)

    def copy_policy(self, folder: Path) -> None:
        """Its two files, with all weights."""
        shutil.copyfile(self._folder / policies.SPEC, folder / policies.SPEC)
        if _is_adapter(self._version):
            policies.save_weights(self.policy(), folder)
        else:
            shutil.copyfile(self._folder / policies.WEIGHTS, folder / policies.WEIGHTS)

    @cached_property
    def _folder(self) -> Path:
        copies = contextlib.ExitStack()
        weakref.finalize(self, copies.close)
        model = copies.enter_context(_downloaded(self._root, self._client, self._version))
        return _verified_policy(self._version, model)


@contextlib.contextmanager
def _downloaded(root: Path, client: MlflowClient, version: ModelVersion) -> Iterator[Path]:
    """The model as MLflow stores it: where a local store has it, or a copy in the project while the block lasts."""
    with contextlib.ExitStack() as copies:
        with hushed(), _readable(version, "policy"):
            location = client.get_model_version_download_uri(version.name, version.version)
            is_local = is_local_uri(location, is_tracking_or_registry_uri=False)
            folder = None if is_local else str(copies.enter_context(locks.scratch(root / paths.DOWNLOADS)))
            uri = f"models:/{version.name}/{version.version}"
            model = Path(mlflow.artifacts.download_artifacts(uri, dst_path=folder))
        yield model


def _verified_policy(version: ModelVersion, model: Path) -> Path:
    """The folder of the policy in a model; RegistryError if its files are not those that were registered."""
    tags = {**_tags_of_weights(version), policies.SPEC: SPEC}
    with hushed(), _readable(version, "policy"):
        stored: str = Model.load(str(model)).flavors[mlflow.pyfunc.FLAVOR_NAME]["artifacts"]["policy"]["path"]
        found = {name: files.sha256(model / stored / name) for name in tags}
        added = [name for name in _WEIGHT_FILES if name not in tags and (model / stored / name).exists()]
    if SPEC not in version.tags:
        raise RegistryError(
            f"version {version.version} of {version.name} was registered by an older Nightshift, without the sha256 of "
            f"its {policies.SPEC}",
            "delete its alias in MLflow (nightshift ui), and register again: nightshift run --force-stage register",
        )
    for name, digest in found.items():
        tag = tags[name]
        if digest != version.tags.get(tag):
            raise RegistryError(
                f"the {name} of version {version.version} of {version.name} is damaged: its sha256 is not the "
                f"registered one ({tag})",
                "nightshift rollback, or nightshift promote another version",
            )
    if added:  # what is loaded depends on which of them are there
        raise RegistryError(
            f"version {version.version} of {version.name} has {added[0]} in MLflow's store, which was not registered",
            "remove that file, or nightshift promote another version",
        )
    return model / stored


def _tags_of_weights(version: ModelVersion) -> Mapping[str, str]:
    return TAGS_OF_ADAPTER if _is_adapter(version) else TAGS_OF_WHOLE


def _is_adapter(version: ModelVersion) -> bool:
    return TRAINED_TAG in version.tags


def champion(root: Path, model: str) -> Champion | None:
    """The version that is champion now."""
    client = connect(root)
    found = champion_version(client, model)
    return Champion(root, client, found) if found else None


def load(root: Path, model: str, which: str) -> Policy:
    """The policy behind an alias or a version number; RegistryError if it is not the one that was registered.

    The copy of our code that lies beside it in MLflow's store is for programs without this package. It is not run here:
    its sha256 is not registered.
    """
    client = connect(root)
    version = look_up(client, model, which)
    with _downloaded(root, client, version) as folder:
        return policies.load(_verified_policy(version, folder))


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


class Played(NamedTuple):
    code: str
    """Digest of the code that played them (`envs.grid.played_by`), or UNKNOWN_CODE."""
    episodes: Sequence[EpisodeOutcome]


def outcomes_of(client: MlflowClient, version: ModelVersion, grid: str, code: str) -> Sequence[EpisodeOutcome] | None:
    """The version's episodes on a grid; None if it was not evaluated on it, or last by other code than `code`."""
    found = played(client, version, grid)
    return found.episodes if found and found.code == code else None


def played(client: MlflowClient, version: ModelVersion, grid: str) -> Played | None:
    """The version's last episodes on a grid; None if it was not evaluated on it."""
    run_id, path = version.tags.get(RUN), f"{OUTCOMES}/{grid}.json"
    with _readable(version, OUTCOMES):
        if not run_id or path not in [file.path for file in client.list_artifacts(run_id, OUTCOMES)]:
            return None
        kept = read_dict(run_id, path)
    return Played(kept.get(CODE, UNKNOWN_CODE), kept["episodes"])


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
    """Move the alias; the version remembers whom it replaced, for a rollback, and if it was champion before, each."""
    tags = client.get_model_version(version.name, version.version).tags
    replaced = [*tags.get(REPLACED, "").split(), tags.get(PREVIOUS, "")]
    previous = str(before.version) if before else ""
    set_tags(client, version, {PREVIOUS: previous, REPLACED: " ".join(filter(None, replaced))})
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
