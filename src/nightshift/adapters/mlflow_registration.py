"""Adding a version to MLflow's registry: the model with its outcomes, the verdict of the gate, and the aliases."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlflow
import numpy as np
from mlflow.entities.model_registry import ModelVersion
from mlflow.models import ModelSignature
from mlflow.tracking import MlflowClient
from mlflow.types import Schema, TensorSpec

import nightshift
from nightshift import files, policies
from nightshift.adapters import mlflow_registry as registry
from nightshift.adapters import mlflow_tracking as tracking
from nightshift.config import CHAMPION
from nightshift.interrupts import deferred
from nightshift.policies import families, on_base
from nightshift.policies.base import Policy, observation_dtype
from nightshift.policies.published import PublishedPolicy
from nightshift.project import paths
from nightshift.reports import gate
from nightshift.reports.gate import Decision, Robustness, Rules, Verdict
from nightshift.statistics.intervals import Rate
from nightshift.statistics.paired import EpisodeOutcome, solved

SHIPPED = ("__init__.py", "errors.py", "plugins.py", "types.py", "policies")
"""What a policy needs of this package; it travels with the model."""


@dataclass(frozen=True, kw_only=True)
class Rematch:
    """A registered version that played the grid of an evaluation as the champion to beat."""

    version: str
    weights: str
    outcomes: Sequence[EpisodeOutcome]


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """The champion of when the evaluation began, which cannot play its grid."""

    version: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """The best candidate of an evaluation, proposed for registration."""

    model: str
    rules: Rules
    candidate: str
    policy: Path
    store_as: Literal["whole", "adapter", "merged"] = "whole"
    """What of it MLflow keeps: `register.weights` of params.yaml."""
    weights: str
    """sha256 of the policy's weights: the same weights are never registered twice."""
    fingerprint: str
    """Of all inputs of the stage: the same one is never registered twice."""
    grid: str
    code: str
    """Digest of the code that played it."""
    outcomes: Sequence[EpisodeOutcome]
    tags: Mapping[str, str]
    rematch: Rematch | None = None
    """The champion on the same grid, if it played in this evaluation."""
    left_out: LeftOut | None = None
    """The champion that could not."""
    robustness: Robustness | None = None
    """Two policies under perturbations, compared last."""

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
    client = registry.connect(root)
    version = _find(client, proposal) or _create(client, root, proposal)
    _add_evaluation(client, version, proposal, proposal.outcomes)
    _add_rematch(client, proposal)
    if not _is_older(client, version):
        with deferred():
            client.set_registered_model_alias(proposal.model, registry.CHALLENGER, version.version)
    decision, champion = _decide(client, root, version, proposal)
    if decision.promote and not _is(version, champion):
        registry.make_champion(client, version, champion)
    now = registry.aliases(client, proposal.model)
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
        run_id=version.tags[registry.RUN],
        pipeline=version.tags[tracking.PIPELINE],
    )


def _find(client: MlflowClient, proposal: Proposal) -> ModelVersion | None:
    """The version with the same fingerprint, else one with the same weights.

    One that an older Nightshift registered without the sha256 of its description cannot be checked, so it is not taken.
    """
    known = [version for version in registry.versions(client, proposal.model) if registry.SPEC in version.tags]
    wanted = {
        tracking.FINGERPRINT: proposal.fingerprint,
        registry.WEIGHTS: proposal.weights,
        registry.MERGED_FROM: proposal.weights,
    }
    return next((v for tag, value in wanted.items() for v in known if v.tags.get(tag) == value), None)


@deferred()
def _create(client: MlflowClient, root: Path, proposal: Proposal) -> ModelVersion:
    """Log model and outcomes under the stage's own run and register it; the tags come with the version, in one step."""
    run_id = _run_of(client, root, proposal.fingerprint)
    version = _log_and_register(client, root, proposal, run_id)
    if run_id:
        client.update_run(run_id, status="RUNNING")  # MLflow ended it, and the stage still works: a kill must show
    return version


def _log_and_register(client: MlflowClient, root: Path, proposal: Proposal, run_id: str | None) -> ModelVersion:
    with mlflow.start_run(run_id=run_id), _scratch(root, proposal.fingerprint) as scratch:
        folder = _stored(proposal, scratch)
        model = _log(folder, scratch)
        active = mlflow.active_run()
        parent = active.data.tags.get(tracking.PARENT)
        pipeline = client.get_run(parent).data.tags.get(tracking.PIPELINE, "") if parent else ""
        tags = {
            **proposal.tags,
            **_evaluation_tags(proposal.grid, proposal.outcomes),
            registry.CANDIDATE: proposal.candidate,
            **_tags_of_weights(proposal, folder),
            registry.SPEC: files.sha256(folder / policies.SPEC),
            tracking.FINGERPRINT: proposal.fingerprint,
            tracking.PIPELINE: pipeline,
            registry.PIPELINE_RUN: parent or "",
            registry.RUN: active.info.run_id,
        }
        _store_outcomes(client, active.info.run_id, proposal, proposal.outcomes)
        mlflow.log_metric("evaluation/success", proposal.rate.rate, model_id=model.model_id)
        with registry.hushed():
            return mlflow.register_model(model.model_uri, proposal.model, tags=tags, await_registration_for=60)


@deferred()
def _add_evaluation(
    client: MlflowClient, version: ModelVersion, proposal: Proposal, outcomes: Sequence[EpisodeOutcome]
) -> None:
    """Keep the outcomes of a version that has not been evaluated on this grid by this code before, in place of those by
    other code; its tags tell the newest."""
    if registry.outcomes_of(client, version, proposal.grid, proposal.code) is None:
        _store_outcomes(client, version.tags[registry.RUN], proposal, outcomes)
        registry.set_tags(client, version, _evaluation_tags(proposal.grid, outcomes))


def _add_rematch(client: MlflowClient, proposal: Proposal) -> None:
    """Keep what the champion did in this evaluation, with its own version."""
    rematch = proposal.rematch
    if rematch is None:
        return
    known = {str(version.version): version for version in registry.versions(client, proposal.model)}
    version = known.get(rematch.version)  # none if it was deleted since
    if version and version.tags.get(registry.WEIGHTS) == rematch.weights:  # else the registry was made anew since
        _add_evaluation(client, version, proposal, rematch.outcomes)


def _rate(outcomes: Sequence[EpisodeOutcome]) -> Rate:
    valid = solved(outcomes)
    return Rate(sum(valid.values()), len(valid))


def _evaluation_tags(grid: str, outcomes: Sequence[EpisodeOutcome]) -> dict[str, str]:
    rate = _rate(outcomes)
    return {
        registry.GRID: grid,
        registry.SUCCESSES: str(rate.successes),
        registry.EPISODES: str(rate.episodes),
        registry.INVALID: str(len(outcomes) - rate.episodes),
        registry.INTERVAL: f"{rate.low:.4f} to {rate.high:.4f}",
    }


def _store_outcomes(client: MlflowClient, run_id: str, proposal: Proposal, outcomes: Sequence[EpisodeOutcome]) -> None:
    kept = {"episodes": list(outcomes), registry.CODE: proposal.code}
    client.log_dict(run_id, kept, f"{registry.OUTCOMES}/{proposal.grid}.json")


@contextlib.contextmanager
def _scratch(root: Path, fingerprint: str) -> Iterator[Path]:
    """An empty folder of the project, for what MLflow copies, too: the system's own may be small or in memory.

    `nightshift gc` removes what a kill leaves."""
    folder = (root / paths.stage_state("register", fingerprint)).absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield folder
    finally:
        tempfile.tempdir = before
        shutil.rmtree(folder, ignore_errors=True)


def _stored(proposal: Proposal, scratch: Path) -> Path:
    """The folder that MLflow keeps: the policy's own, or one in `scratch`."""
    if proposal.store_as == "whole":
        return proposal.policy
    folder = scratch / "policy"
    folder.mkdir()
    policy = policies.load(proposal.policy)
    if proposal.store_as == "adapter":
        on_base.save(policy, folder)
    else:
        assert isinstance(policy, PublishedPolicy)
        policies.save(policy.without_adapters(), folder)
    return folder


def _tags_of_weights(proposal: Proposal, folder: Path) -> dict[str, str]:
    if proposal.store_as == "adapter":
        own = {tag: files.sha256(folder / name) for name, tag in registry.TAGS_OF_ADAPTER.items()}
        return {registry.WEIGHTS: proposal.weights, **own}
    if proposal.store_as == "merged":
        return {registry.WEIGHTS: files.sha256(folder / policies.WEIGHTS), registry.MERGED_FROM: proposal.weights}
    return {registry.WEIGHTS: proposal.weights}


def _log(folder: Path, scratch: Path) -> Any:
    policy = policies.load(folder)  # of an adapter it checks the base
    with registry.hushed():
        return mlflow.pyfunc.log_model(
            name="policy",
            python_model=str(Path(__file__).parent / "policy_model.py"),
            artifacts={"policy": str(folder)},
            signature=_signature(policy),
            input_example={
                name: np.zeros((1, *shape), observation_dtype(shape)) for name, shape in policy.shapes.items()
            },
            code_paths=[str(_shipped(scratch))],
            pip_requirements=["mlflow", "torch", "numpy", "safetensors", *_package(policy)],
        )


def _package(policy: Policy) -> list[str]:
    """The package that adds the family of the policy; a family of Nightshift travels with the model."""
    release = families.release(policy.spec["family"])
    return ["==".join(release.split(" "))] if release else []


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


def _run_of(client: MlflowClient, root: Path, fingerprint: str) -> str | None:
    """The run the stage is being tracked in, if it is; a clone may be running the same stage in its own."""
    experiment = client.get_experiment_by_name(tracking.EXPERIMENT)
    if not experiment:
        return None
    wanted = {tracking.FINGERPRINT: fingerprint, tracking.FOLDER: tracking.folder_tag(root)}
    same = " and ".join(f"tags.`{tag}` = '{value}'" for tag, value in wanted.items())
    condition = f"{same} and attributes.status = 'RUNNING'"
    runs = client.search_runs([experiment.experiment_id], condition, max_results=1)
    return str(runs[0].info.run_id) if runs else None


def _decide(
    client: MlflowClient, root: Path, version: ModelVersion, proposal: Proposal
) -> tuple[Decision, ModelVersion | None]:
    """Whether the version becomes champion, and in place of which one; the numbers and the reason are kept with it."""
    title = f"version {version.version} ({proposal.candidate})"
    champion = registry.champion_version(client, proposal.model)
    if champion is not None and _is(version, champion):
        return _champion_already(client, root, champion, proposal, title), champion
    if _is_older(client, version):
        return gate.older(title, f"version {_challenger(client, proposal.model)}"), champion
    decision = _judge(client, title, version, champion, proposal)
    if _number(registry.champion_version(client, proposal.model)) != _number(champion):
        return _decide(client, root, version, proposal)  # somebody has promoted another one meanwhile
    p_value = registry.NOT_TESTED if decision.p_value is None else repr(decision.p_value)
    rules = {
        registry.LEVEL: proposal.rules.level,
        registry.BAR: proposal.rules.min_success_rate,
        registry.MARGIN: proposal.rules.max_task_drop,
    }
    judged = {registry.P_VALUE: p_value, registry.VERDICT: decision.verdict.value, registry.REASON: decision.reason}
    registry.set_tags(client, version, {**{name: str(value) for name, value in rules.items()}, **judged})
    return decision, champion


def _judge(
    client: MlflowClient, title: str, version: ModelVersion, champion: ModelVersion | None, proposal: Proposal
) -> Decision:
    if registry.WITHDRAWN in version.tags:
        return gate.withdrawn(title, version.tags[registry.WITHDRAWN])
    if champion is None:
        return gate.no_champion(title, proposal.rate, proposal.rules)
    theirs = registry.outcomes_of(client, champion, proposal.grid, proposal.code)
    name = f"version {champion.version}"
    if theirs is None:
        left_out = proposal.left_out
        why = left_out.why if left_out and left_out.version == str(champion.version) else ""
        return gate.not_compared(title, name, proposal.rate, proposal.rules, number=str(version.version), why=why)
    decision = gate.compare(title, name, solved(proposal.outcomes), solved(theirs), proposal.rules)
    margin = proposal.rules.max_perturbation_drop
    if margin is None:
        return decision
    found = proposal.robustness
    ours = proposal.weights, version.tags.get(registry.WEIGHTS)  # of the policy's folder, or of the version
    of_these = found if found and found.ours in ours and found.theirs == champion.tags.get(registry.WEIGHTS) else None
    return gate.robust(decision, title, name, of_these, margin)


def _challenger(client: MlflowClient, model: str) -> int:
    """The newest version that was proposed; 0 if there is none."""
    return int(registry.aliases(client, model).get(registry.CHALLENGER, 0))


def _is_older(client: MlflowClient, version: ModelVersion) -> bool:
    """Whether a version of the past was made again: a checkout of old code and data does not move aliases back."""
    return int(version.version) < _challenger(client, version.name)


def _number(version: ModelVersion | None) -> str:
    return str(version.version) if version else ""


def _is(version: ModelVersion, other: ModelVersion | None) -> bool:
    return other is not None and other.version == version.version


def _champion_already(
    client: MlflowClient, root: Path, version: ModelVersion, proposal: Proposal, title: str
) -> Decision:
    """A registration that is repeated reports the reason it had, which stays in the registry as it is.

    It is a promotion only if it completes the run that moved the alias: that one was killed before it could tell.
    """
    repeated = version.tags[tracking.FINGERPRINT] == proposal.fingerprint
    if not repeated or registry.REASON not in version.tags:  # no reason: somebody set the alias by hand
        return gate.same_weights(title, proposal.rate)
    # The p-value is absent if it was promoted by hand before the gate had judged it.
    p_value = version.tags.get(registry.P_VALUE, registry.NOT_TESTED)
    completes = version.tags[registry.RUN] == _run_of(client, root, proposal.fingerprint)
    promoted = completes and version.tags.get(registry.VERDICT) == Verdict.PROMOTED
    return Decision(
        verdict=Verdict.PROMOTED if promoted else Verdict.CHAMPION_ALREADY,
        reason=version.tags[registry.REASON],
        p_value=None if p_value == registry.NOT_TESTED else float(p_value),
    )
