"""MLflow as the registry of policies: `challenger` is the newest, `champion` the best on the same evaluation grid."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.models import ModelSignature
from mlflow.pyfunc import PyFuncModel
from mlflow.tracking import MlflowClient
from mlflow.types import Schema, TensorSpec

import nightshift
from nightshift import files
from nightshift.adapters import mlflow_tracking as tracking
from nightshift.errors import RegistryError

CHALLENGER = "challenger"
CHAMPION = "champion"

GRID = "evaluation.grid"
SUCCESSES = "evaluation.successes"
EPISODES = "evaluation.episodes"
RUN = "run_id"
SHIPPED = ("__init__.py", "types.py", "policies")
"""What a policy needs of this package; it travels with the model."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A policy that asks to be registered."""

    model: str
    policy: Path
    fingerprint: str
    """Of everything that made it: the same one is never registered twice."""
    grid: str
    successes: int
    episodes: int
    tags: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Registration:
    model: str
    version: str
    aliases: tuple[str, ...]
    champion: str
    """The version that is champion now."""
    why: str
    run_id: str
    pipeline: str
    """Fingerprint of the params of the pipeline."""


def register(root: Path, candidate: Candidate) -> Registration:
    """Register the policy once, call it challenger, and let it be champion if it is better on the same grid."""
    client = tracking.connect(root)
    mlflow.set_tracking_uri(client.tracking_uri)
    version = _find(client, candidate) or _create(client, candidate)
    client.set_registered_model_alias(candidate.model, CHALLENGER, version.version)
    champion, why = _decide(client, candidate, version)
    if champion == version.version:
        client.set_registered_model_alias(candidate.model, CHAMPION, version.version)
    aliases = client.get_model_version(candidate.model, version.version).aliases
    return Registration(
        model=candidate.model,
        version=str(version.version),
        aliases=tuple(sorted(aliases)),
        champion=str(champion),
        why=why,
        run_id=version.tags[RUN],
        pipeline=version.tags[tracking.PIPELINE],
    )


def load(root: Path, model: str, which: str) -> PyFuncModel:
    """The model behind an alias or a version number."""
    client = tracking.connect(root)
    mlflow.set_tracking_uri(client.tracking_uri)
    version = _look_up(client, model, which)
    path = list(sys.path)
    try:
        with _hushed():
            return mlflow.pyfunc.load_model(f"models:/{model}/{version.version}")
    finally:
        sys.path[:] = path  # MLflow puts the model's own copy of our code first; workers started later need all of it


def policy_of(model: PyFuncModel) -> Any:
    """The torch policy inside a loaded model."""
    return model.unwrap_python_model().policy


def _look_up(client: MlflowClient, model: str, which: str) -> ModelVersion:
    try:
        if which.isdigit():
            return client.get_model_version(model, which)
        return client.get_model_version_by_alias(model, which)
    except MlflowException:
        known = _versions(client, model)
        if not known:
            raise RegistryError(f"MLflow has no model {model!r} yet", "nightshift run") from None
        names = sorted({CHAMPION, CHALLENGER, *(str(v.version) for v in known)})
        raise RegistryError(f"{model} has no version or alias {which!r}", f"choose one of {', '.join(names)}") from None


def _versions(client: MlflowClient, model: str) -> list[ModelVersion]:
    return list(client.search_model_versions(f"name = '{model}'"))


def _find(client: MlflowClient, candidate: Candidate) -> ModelVersion | None:
    same = [v for v in _versions(client, candidate.model) if v.tags.get(tracking.FINGERPRINT) == candidate.fingerprint]
    return same[0] if same else None


def _create(client: MlflowClient, candidate: Candidate) -> ModelVersion:
    """Log the model under the stage's own run and register it; the tags come with the version, in one step."""
    run_id = _run_of(client, candidate.fingerprint)
    with mlflow.start_run(run_id=run_id), tempfile.TemporaryDirectory() as scratch:
        model = _log(candidate, Path(scratch))
        active = mlflow.active_run()
        parent = active.data.tags.get(tracking.PARENT)
        pipeline = client.get_run(parent).data.tags.get(tracking.PIPELINE, "") if parent else ""
        tags = {
            **candidate.tags,
            tracking.FINGERPRINT: candidate.fingerprint,
            tracking.PIPELINE: pipeline,
            GRID: candidate.grid,
            SUCCESSES: str(candidate.successes),
            EPISODES: str(candidate.episodes),
            RUN: active.info.run_id,
        }
        mlflow.log_metric("evaluation/success", candidate.successes / candidate.episodes, model_id=model.model_id)
        with _hushed():
            return mlflow.register_model(model.model_uri, candidate.model, tags=tags, await_registration_for=60)


def _log(candidate: Candidate, scratch: Path) -> Any:
    spec = json.loads((candidate.policy / "policy.json").read_text())
    files.verify_folder(candidate.policy, "nightshift run makes it again")
    with _hushed():
        return mlflow.pyfunc.log_model(
            name="policy",
            python_model=str(Path(__file__).parent / "policy_model.py"),
            artifacts={"policy": str(candidate.policy)},
            signature=_signature(spec["inputs"], spec["chunk"], spec["action_dim"]),
            input_example={name: np.zeros((1, size), np.float32) for name, size in spec["inputs"].items()},
            code_paths=[str(_shipped(scratch))],
            pip_requirements=["mlflow", "torch", "numpy", "safetensors"],
        )


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """MLflow announces every step on stderr; errors are raised all the same."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def _signature(inputs: Mapping[str, int], chunk: int, action_dim: int) -> ModelSignature:
    observations = [TensorSpec(np.dtype(np.float32), (-1, size), name) for name, size in inputs.items()]
    actions = TensorSpec(np.dtype(np.float32), (-1, chunk, action_dim))
    return ModelSignature(Schema(observations), Schema([actions]))


def _shipped(scratch: Path) -> Path:
    """A copy of the part of this package that a policy needs."""
    source = Path(nightshift.__file__).parent
    package = scratch / source.name
    package.mkdir()
    for name in SHIPPED:
        if (source / name).is_dir():
            modules = [p.relative_to(source) for p in (source / name).glob("*.py")]
        else:
            modules = [Path(name)]
        for module in modules:
            (package / module).parent.mkdir(exist_ok=True)
            shutil.copy(source / module, package / module)
    return package


def _run_of(client: MlflowClient, fingerprint: str) -> str | None:
    """The run the stage is being tracked in, if it is."""
    experiment = client.get_experiment_by_name(tracking.EXPERIMENT)
    if not experiment:
        return None
    condition = f"tags.`{tracking.FINGERPRINT}` = '{fingerprint}' and attributes.status = 'RUNNING'"
    runs = client.search_runs([experiment.experiment_id], condition, max_results=1)
    return str(runs[0].info.run_id) if runs else None


def _decide(client: MlflowClient, candidate: Candidate, version: ModelVersion) -> tuple[str, str]:
    """The version that should be champion, and why."""
    if CHAMPION not in client.get_registered_model(candidate.model).aliases:
        return version.version, "there was no champion to compare with"
    champion = client.get_model_version_by_alias(candidate.model, CHAMPION)
    ours = f"{candidate.successes} of {candidate.episodes}"
    theirs = f"{champion.tags.get(SUCCESSES)} of {champion.tags.get(EPISODES)}"
    if champion.version == version.version:
        return version.version, f"it is the champion, with {ours} episodes"
    if champion.tags.get(GRID) != candidate.grid:
        return (
            champion.version,
            f"version {champion.version} stays: it was evaluated on another grid, so they cannot be compared",
        )
    if candidate.successes > int(champion.tags[SUCCESSES]):
        return (
            version.version,
            f"better than version {champion.version} on the same grid: {ours} against {theirs} episodes",
        )
    return champion.version, f"version {champion.version} stays: {theirs} episodes against {ours} on the same grid"
