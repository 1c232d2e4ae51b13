"""MLflow as the registry of policies: `challenger` is the newest, `champion` the best that was shown to be better.

Every version keeps its per-episode outcomes in its run, one file per evaluation grid, so that later versions can be
compared with it state by state.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
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
from nightshift import policies
from nightshift.adapters import mlflow_tracking as tracking
from nightshift.errors import RegistryError
from nightshift.policies.base import Policy, observation_dtype
from nightshift.reports import gate
from nightshift.reports.gate import Decision
from nightshift.statistics.intervals import Rate
from nightshift.statistics.paired import EpisodeOutcome, Paired, solved

CHALLENGER = "challenger"
CHAMPION = "champion"

CANDIDATE = "candidate"
WEIGHTS = "policy.sha256"
GRID = "evaluation.grid"
SUCCESSES = "evaluation.successes"
EPISODES = "evaluation.episodes"
INVALID = "evaluation.invalid"
LEVEL = "gate.level"
P_VALUE = "gate.p_value"
NOT_TESTED = "not tested"
REASON = "gate.reason"
PREVIOUS = "champion.previous"
"""The version that was champion before it; empty if there was none."""
RUN = "run_id"
OUTCOMES = "outcomes"
"""Folder of a version's run that holds <grid>.json."""
SHIPPED = ("__init__.py", "errors.py", "types.py", "policies")
"""What a policy needs of this package; it travels with the model."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """The best candidate of an evaluation, proposed for registration."""

    model: str
    level: float
    """One-sided p at which it counts as better than the champion."""
    candidate: str
    policy: Path
    weights: str
    """sha256 of the policy's weights: the same weights are never registered twice."""
    fingerprint: str
    """Of all inputs of the stage: the same one is never registered twice."""
    grid: str
    outcomes: Sequence[EpisodeOutcome]
    tags: Mapping[str, str]

    @property
    def rate(self) -> Rate:
        valid = solved(self.outcomes)
        return Rate(sum(valid.values()), len(valid))


@dataclass(frozen=True, kw_only=True)
class Registration:
    model: str
    version: str
    candidate: str
    aliases: tuple[str, ...]
    champion: str
    """The version that is champion now."""
    reason: str
    """Why the version is champion or not, in one sentence."""
    p_value: float | None
    level: float
    run_id: str
    pipeline: str
    """Fingerprint of the params of the pipeline."""


def register(root: Path, proposal: Proposal) -> Registration:
    """Register the policy once, as challenger, and as champion if it is better than the one there is.

    Every step can be repeated, so that a run that died between two of them is completed by the next one. The reason is
    written before the alias moves: no version is champion without one.
    """
    client = tracking.connect(root)
    mlflow.set_tracking_uri(client.tracking_uri)
    version = _find(client, proposal) or _create(client, proposal)
    _add_evaluation(client, version, proposal)
    client.set_registered_model_alias(proposal.model, CHALLENGER, version.version)
    decision = _decide(client, version, proposal)
    if decision.promote:
        before = _champion(client, proposal.model)
        _set_tags(client, version, {PREVIOUS: str(before.version) if before else ""})
        client.set_registered_model_alias(proposal.model, CHAMPION, version.version)
    aliases = client.get_model_version(proposal.model, version.version).aliases
    champion = client.get_model_version_by_alias(proposal.model, CHAMPION)
    return Registration(
        model=proposal.model,
        version=str(version.version),
        candidate=proposal.candidate,
        aliases=tuple(sorted(aliases)),
        champion=str(champion.version),
        reason=decision.reason,
        p_value=decision.p_value,
        level=proposal.level,
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


def _find(client: MlflowClient, proposal: Proposal) -> ModelVersion | None:
    """The version with the same fingerprint, else one with the same weights."""
    versions = _versions(client, proposal.model)
    wanted = {tracking.FINGERPRINT: proposal.fingerprint, WEIGHTS: proposal.weights}
    return next((v for tag, value in wanted.items() for v in versions if v.tags.get(tag) == value), None)


def _create(client: MlflowClient, proposal: Proposal) -> ModelVersion:
    """Log model and outcomes under the stage's own run and register it; the tags come with the version, in one step."""
    run_id = _run_of(client, proposal.fingerprint)
    with mlflow.start_run(run_id=run_id), tempfile.TemporaryDirectory() as scratch:
        model = _log(proposal, Path(scratch))
        active = mlflow.active_run()
        parent = active.data.tags.get(tracking.PARENT)
        pipeline = client.get_run(parent).data.tags.get(tracking.PIPELINE, "") if parent else ""
        tags = {
            **proposal.tags,
            **_evaluation_tags(proposal),
            CANDIDATE: proposal.candidate,
            WEIGHTS: proposal.weights,
            tracking.FINGERPRINT: proposal.fingerprint,
            tracking.PIPELINE: pipeline,
            RUN: active.info.run_id,
        }
        _store_outcomes(client, active.info.run_id, proposal)
        mlflow.log_metric("evaluation/success", proposal.rate.rate, model_id=model.model_id)
        with _hushed():
            return mlflow.register_model(model.model_uri, proposal.model, tags=tags, await_registration_for=60)


def _add_evaluation(client: MlflowClient, version: ModelVersion, proposal: Proposal) -> None:
    """Keep the outcomes of a version that was found and has not been evaluated on this grid before."""
    if outcomes_of(client, version, proposal.grid) is None:
        _store_outcomes(client, version.tags[RUN], proposal)
        figures = {key: value for key, value in proposal.tags.items() if key.startswith("evaluation.")}
        _set_tags(client, version, figures | _evaluation_tags(proposal))


def _evaluation_tags(proposal: Proposal) -> dict[str, str]:
    return {
        GRID: proposal.grid,
        SUCCESSES: str(proposal.rate.successes),
        EPISODES: str(proposal.rate.episodes),
        INVALID: str(len(proposal.outcomes) - proposal.rate.episodes),
    }


def _set_tags(client: MlflowClient, version: ModelVersion, tags: Mapping[str, str]) -> None:
    for key, value in tags.items():
        client.set_model_version_tag(version.name, version.version, key, value)


def _store_outcomes(client: MlflowClient, run_id: str, proposal: Proposal) -> None:
    client.log_dict(run_id, {"episodes": list(proposal.outcomes)}, f"{OUTCOMES}/{proposal.grid}.json")


def outcomes_of(client: MlflowClient, version: ModelVersion, grid: str) -> Sequence[EpisodeOutcome] | None:
    """The version's episodes on a grid; None if it was not evaluated on it."""
    run_id, path = version.tags.get(RUN), f"{OUTCOMES}/{grid}.json"
    try:
        if not run_id or path not in [file.path for file in client.list_artifacts(run_id, OUTCOMES)]:
            return None
        with _hushed():
            episodes: Sequence[EpisodeOutcome] = mlflow.artifacts.load_dict(f"runs:/{run_id}/{path}")["episodes"]
    except (MlflowException, OSError) as error:
        raise RegistryError(
            f"the outcomes of version {version.version} of {version.name} cannot be read: {error}",
            "bring its MLflow run back, or delete the version",
        ) from error
    return episodes


def _log(proposal: Proposal, scratch: Path) -> Any:
    policy = policies.load(proposal.policy)
    with _hushed():
        return mlflow.pyfunc.log_model(
            name="policy",
            python_model=str(Path(__file__).parent / "policy_model.py"),
            artifacts={"policy": str(proposal.policy)},
            signature=_signature(policy),
            input_example={
                name: np.zeros((1, *shape), observation_dtype(shape)) for name, shape in policy.shapes.items()
            },
            code_paths=[str(_shipped(scratch))],
            pip_requirements=["mlflow", "torch", "numpy", "safetensors"],
        )


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """MLflow reports every step on stderr; errors are still raised."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def _signature(policy: Policy) -> ModelSignature:
    observations = [TensorSpec(observation_dtype(shape), (-1, *shape), name) for name, shape in policy.shapes.items()]
    actions = TensorSpec(np.dtype(np.float32), (-1, policy.chunk, policy.action_dim))
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


def _decide(client: MlflowClient, version: ModelVersion, proposal: Proposal) -> Decision:
    """Whether the version becomes champion; the numbers and the reason are kept with it."""
    title = f"version {version.version} ({proposal.candidate})"
    champion = _champion(client, proposal.model)
    if champion is not None and champion.version == version.version:
        return _champion_already(version, proposal, title)
    decision = _compare(client, title, champion, proposal) if champion else gate.no_champion(title, proposal.rate)
    p_value = NOT_TESTED if decision.p_value is None else repr(decision.p_value)
    _set_tags(client, version, {LEVEL: str(proposal.level), P_VALUE: p_value, REASON: decision.reason})
    return decision


def _champion(client: MlflowClient, model: str) -> ModelVersion | None:
    if CHAMPION not in client.get_registered_model(model).aliases:
        return None
    return client.get_model_version_by_alias(model, CHAMPION)


def _champion_already(version: ModelVersion, proposal: Proposal, title: str) -> Decision:
    """A registration that is repeated reports the decision it made; the reason in the registry stays as it is."""
    repeated = version.tags[tracking.FINGERPRINT] == proposal.fingerprint
    if not repeated or REASON not in version.tags:  # no reason: somebody set the alias by hand
        return gate.same_weights(title, proposal.rate)
    p_value = version.tags[P_VALUE]
    return Decision(
        promote=False, reason=version.tags[REASON], p_value=None if p_value == NOT_TESTED else float(p_value)
    )


def _compare(client: MlflowClient, title: str, champion: ModelVersion, proposal: Proposal) -> Decision:
    theirs = outcomes_of(client, champion, proposal.grid)
    name = f"version {champion.version}"
    if theirs is None:
        return gate.other_grid(title, name, proposal.rate)
    return gate.compare(title, name, Paired.between(solved(proposal.outcomes), solved(theirs)), proposal.level)
