"""MLflow as the registry of policies: `challenger` is the newest, `champion` the best that was shown to be better.

Every version keeps its per-episode outcomes in its run, one file per evaluation grid, so that later versions can be
compared with it state by state.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode
from mlflow.tracking import MlflowClient
from mlflow.types import Schema, TensorSpec

import nightshift
from nightshift import files, policies
from nightshift.adapters import mlflow_tracking as tracking
from nightshift.config import CHAMPION
from nightshift.errors import RegistryError
from nightshift.interrupts import deferred
from nightshift.policies.base import Policy, observation_dtype
from nightshift.reports import gate
from nightshift.reports.gate import Decision, Rules, Verdict
from nightshift.statistics.intervals import Rate
from nightshift.statistics.paired import EpisodeOutcome, solved

CHALLENGER = "challenger"

DATASET = "dataset.md5"
DATASET_EPISODES = "dataset.episodes"
COMMIT = "code.commit"
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
SHIPPED = ("__init__.py", "errors.py", "types.py", "policies")
"""What a policy needs of this package; it travels with the model."""


@dataclass(frozen=True, kw_only=True)
class Rematch:
    """A registered version that played the grid of an evaluation as the champion to beat."""

    version: str
    weights: str
    outcomes: Sequence[EpisodeOutcome]


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """The best candidate of an evaluation, proposed for registration."""

    model: str
    rules: Rules
    candidate: str
    policy: Path
    weights: str
    """sha256 of the policy's weights: the same weights are never registered twice."""
    fingerprint: str
    """Of all inputs of the stage: the same one is never registered twice."""
    grid: str
    outcomes: Sequence[EpisodeOutcome]
    tags: Mapping[str, str]
    rematch: Rematch | None = None
    """The champion on the same grid, if it played in this evaluation."""

    @property
    def rate(self) -> Rate:
        return _rate(self.outcomes)


@dataclass(frozen=True, kw_only=True)
class Registration:
    model: str
    version: str
    candidate: str
    aliases: tuple[str, ...]
    champion: str
    """The version that is champion now; empty if there is none."""
    verdict: Verdict
    """Of the gate, on this registration."""
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
    client = _client(root)
    version = _find(client, proposal) or _create(client, proposal)
    _add_evaluation(client, version, proposal.grid, proposal.outcomes)
    _add_rematch(client, proposal)
    if not _is_older(client, version):
        with deferred():
            client.set_registered_model_alias(proposal.model, CHALLENGER, version.version)
    decision = _decide(client, version, proposal)
    champion = champion_version(client, proposal.model)
    if decision.promote and not _is(version, champion):
        make_champion(client, version, champion)
    now = aliases(client, proposal.model)
    return Registration(
        model=proposal.model,
        version=str(version.version),
        candidate=proposal.candidate,
        aliases=tuple(sorted(alias for alias, number in now.items() if number == str(version.version))),
        champion=now.get(CHAMPION, ""),
        verdict=decision.verdict,
        reason=decision.reason,
        p_value=decision.p_value,
        level=proposal.rules.level,
        run_id=version.tags[RUN],
        pipeline=version.tags[tracking.PIPELINE],
    )


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
    with _hushed(), _readable(version, "policy"):
        return Path(mlflow.artifacts.download_artifacts(f"models:/{version.name}/{version.version}"))


def _verified_policy(version: ModelVersion, model: Path) -> Path:
    """The folder of the policy in a model; RegistryError if its two files are not those that were registered."""
    with _hushed(), _readable(version, "policy"):
        stored: str = Model.load(str(model)).flavors[mlflow.pyfunc.FLAVOR_NAME]["artifacts"]["policy"]["path"]
        found = {name: files.sha256(model / stored / name) for name in (policies.WEIGHTS, policies.SPEC)}
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
    client = _client(root)
    found = champion_version(client, model)
    return Champion(client, found) if found else None


def load(root: Path, model: str, which: str) -> Policy:
    """The policy behind an alias or a version number; RegistryError if it is not the one that was registered.

    The copy of our code that lies beside it in MLflow's store is for programs without this package. It is not run here:
    its sha256 is not registered.
    """
    version = look_up(_client(root), model, which)
    return policies.load(_verified_policy(version, _download(version)))


def _client(root: Path) -> MlflowClient:
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
        names = sorted({CHAMPION, CHALLENGER, *(str(v.version) for v in known)})
        raise RegistryError(f"{model} has no version or alias {which!r}", f"choose one of {', '.join(names)}") from None


def versions(client: MlflowClient, model: str) -> list[ModelVersion]:
    return list(client.search_model_versions(f"name = '{model}'"))


def _find(client: MlflowClient, proposal: Proposal) -> ModelVersion | None:
    """The version with the same fingerprint, else one with the same weights."""
    known = versions(client, proposal.model)
    wanted = {tracking.FINGERPRINT: proposal.fingerprint, WEIGHTS: proposal.weights}
    return next((v for tag, value in wanted.items() for v in known if v.tags.get(tag) == value), None)


@deferred()
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
            **_evaluation_tags(proposal.grid, proposal.outcomes),
            CANDIDATE: proposal.candidate,
            WEIGHTS: proposal.weights,
            SPEC: files.sha256(proposal.policy / policies.SPEC),
            tracking.FINGERPRINT: proposal.fingerprint,
            tracking.PIPELINE: pipeline,
            PIPELINE_RUN: parent or "",
            RUN: active.info.run_id,
        }
        _store_outcomes(client, active.info.run_id, proposal.grid, proposal.outcomes)
        mlflow.log_metric("evaluation/success", proposal.rate.rate, model_id=model.model_id)
        with _hushed():
            return mlflow.register_model(model.model_uri, proposal.model, tags=tags, await_registration_for=60)


@deferred()
def _add_evaluation(client: MlflowClient, version: ModelVersion, grid: str, outcomes: Sequence[EpisodeOutcome]) -> None:
    """Keep the outcomes of a version that has not been evaluated on this grid before; its tags tell the newest."""
    if outcomes_of(client, version, grid) is None:
        _store_outcomes(client, version.tags[RUN], grid, outcomes)
        set_tags(client, version, _evaluation_tags(grid, outcomes))


def _add_rematch(client: MlflowClient, proposal: Proposal) -> None:
    """Keep what the champion did in this evaluation, with its own version."""
    rematch = proposal.rematch
    if rematch is None:
        return
    known = {str(version.version): version for version in versions(client, proposal.model)}
    version = known.get(rematch.version)  # none if it was deleted since
    if version and version.tags.get(WEIGHTS) == rematch.weights:  # else the registry was made anew since
        _add_evaluation(client, version, proposal.grid, rematch.outcomes)


def _rate(outcomes: Sequence[EpisodeOutcome]) -> Rate:
    valid = solved(outcomes)
    return Rate(sum(valid.values()), len(valid))


def _evaluation_tags(grid: str, outcomes: Sequence[EpisodeOutcome]) -> dict[str, str]:
    rate = _rate(outcomes)
    return {
        GRID: grid,
        SUCCESSES: str(rate.successes),
        EPISODES: str(rate.episodes),
        INVALID: str(len(outcomes) - rate.episodes),
        INTERVAL: f"{rate.low:.4f} to {rate.high:.4f}",
    }


@deferred()
def set_tags(client: MlflowClient, version: ModelVersion, tags: Mapping[str, str]) -> None:
    for key, value in tags.items():
        client.set_model_version_tag(version.name, version.version, key, value)


def _store_outcomes(client: MlflowClient, run_id: str, grid: str, outcomes: Sequence[EpisodeOutcome]) -> None:
    client.log_dict(run_id, {"episodes": list(outcomes)}, f"{OUTCOMES}/{grid}.json")


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
    with _hushed():
        content: Mapping[str, Any] = mlflow.artifacts.load_dict(f"runs:/{run_id}/{path}")
    return content


def read_bytes(run_id: str, path: str) -> bytes:
    """A file among the artifacts of a run."""
    with _hushed(), tempfile.TemporaryDirectory() as scratch:
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
            modules = [p.relative_to(source) for p in (source / name).rglob("*.py")]
        else:
            modules = [Path(name)]
        for module in modules:
            (package / module).parent.mkdir(parents=True, exist_ok=True)
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
    champion = champion_version(client, proposal.model)
    if _is(version, champion):
        return _champion_already(client, version, proposal, title)
    if _is_older(client, version):
        return gate.older(title, f"version {_challenger(client, proposal.model)}")
    decision = _judge(client, title, version, champion, proposal)
    p_value = NOT_TESTED if decision.p_value is None else repr(decision.p_value)
    rules = {LEVEL: proposal.rules.level, BAR: proposal.rules.min_success_rate, MARGIN: proposal.rules.max_task_drop}
    tags = {name: str(value) for name, value in rules.items()}
    set_tags(client, version, {**tags, P_VALUE: p_value, VERDICT: decision.verdict.value, REASON: decision.reason})
    return decision


def _judge(
    client: MlflowClient, title: str, version: ModelVersion, champion: ModelVersion | None, proposal: Proposal
) -> Decision:
    if WITHDRAWN in version.tags:
        return gate.withdrawn(title, version.tags[WITHDRAWN])
    if champion is None:
        return gate.no_champion(title, proposal.rate, proposal.rules)
    theirs = outcomes_of(client, champion, proposal.grid)
    name = f"version {champion.version}"
    if theirs is None:
        return gate.other_grid(title, name, proposal.rate)
    return gate.compare(title, name, solved(proposal.outcomes), solved(theirs), proposal.rules)


def _challenger(client: MlflowClient, model: str) -> int:
    """The newest version that was proposed; 0 if there is none."""
    return int(aliases(client, model).get(CHALLENGER, 0))


@deferred()
def make_champion(client: MlflowClient, version: ModelVersion, before: ModelVersion | None) -> None:
    """Move the alias; the version remembers whom it replaced, for a rollback."""
    set_tags(client, version, {PREVIOUS: str(before.version) if before else ""})
    client.set_registered_model_alias(version.name, CHAMPION, version.version)


def grids(client: MlflowClient, version: ModelVersion) -> list[str]:
    """Digests of the evaluations that it has played."""
    with _readable(version, OUTCOMES):
        return [Path(file.path).stem for file in client.list_artifacts(version.tags[RUN], OUTCOMES)]


def _is_older(client: MlflowClient, version: ModelVersion) -> bool:
    """Whether a version of the past was made again: a checkout of old code and data does not move aliases back."""
    return int(version.version) < _challenger(client, version.name)


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


def _is(version: ModelVersion, other: ModelVersion | None) -> bool:
    return other is not None and other.version == version.version


def _champion_already(client: MlflowClient, version: ModelVersion, proposal: Proposal, title: str) -> Decision:
    """A registration that is repeated reports the reason it had, which stays in the registry as it is.

    It is a promotion only if it completes the run that moved the alias: that one was killed before it could tell.
    """
    repeated = version.tags[tracking.FINGERPRINT] == proposal.fingerprint
    if not repeated or REASON not in version.tags:  # no reason: somebody set the alias by hand
        return gate.same_weights(title, proposal.rate)
    p_value = version.tags.get(P_VALUE, NOT_TESTED)  # absent if it was promoted by hand before the gate had judged it
    completes = version.tags[RUN] == _run_of(client, proposal.fingerprint)
    promoted = completes and version.tags.get(VERDICT) == Verdict.PROMOTED
    return Decision(
        verdict=Verdict.PROMOTED if promoted else Verdict.CHAMPION_ALREADY,
        reason=version.tags[REASON],
        p_value=None if p_value == NOT_TESTED else float(p_value),
    )
