"""Facts about registered versions and runs, and moving the alias champion by hand.

What the commands `models`, `lineage`, `runs` and `compare` show, as plain values, so that reports show the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from mlflow.entities import Run
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from nightshift.adapters import mlflow_registry as registry
from nightshift.adapters import mlflow_tracking as tracking
from nightshift.adapters.tracking import RunKind
from nightshift.config import CHAMPION
from nightshift.errors import RegistryError
from nightshift.interrupts import deferred
from nightshift.statistics.intervals import Rate
from nightshift.statistics.paired import Cell, solved
from nightshift.telemetry import metric_names

EVERY = 50_000
"""Limit of a list of runs: the most that MLflow gives at once."""


@dataclass(frozen=True, kw_only=True)
class Version:
    """A version of a model."""

    model: str
    version: str
    aliases: tuple[str, ...]
    candidate: str
    """The stage that made it."""
    created: datetime
    result: Rate | None
    """Of its newest evaluation."""
    grid: str
    """Digest of that evaluation."""
    verdict: str
    """Of the gate; empty if it was not asked."""
    reason: str
    """What the gate, or a person, decided about it."""
    previous: str
    """The champion that it replaced; empty if there was none, or it never was champion."""
    withdrawn: str
    """When it was rolled back; empty if it was not."""
    dataset: str
    """md5 of the dataset."""
    episodes: str
    """Of the dataset."""
    commit: str
    started_from: str
    """The version whose weights training started from; empty if from scratch."""
    policy_package: str
    """The package that adds the family of its policy; empty for a family of ours."""
    weights: str
    """sha256."""
    run_id: str
    """The run of `register` in MLflow that made it."""
    pipeline_run: str
    """The run of the pipeline in MLflow that made it."""

    @property
    def is_champion(self) -> bool:
        return CHAMPION in self.aliases


@dataclass(frozen=True, kw_only=True)
class PipelineRun:
    """A run of the pipeline."""

    run_id: str
    name: str
    status: str
    started: datetime
    seconds: float | None
    """How long it took; None while it runs."""
    commit: str
    success: float | None
    """Of its best candidate."""
    low: float | None
    high: float | None
    version: str
    """The version it registered; empty if none."""
    promoted: bool
    changed: str
    """Params that differ from the run before it."""
    params: Mapping[str, str]


def versions(root: Path, model: str) -> list[Version]:
    """Every version of a model, newest first."""
    client = tracking.connect(root)
    aliases = _aliases(client, model)
    found = [_version(version, aliases) for version in registry.versions(client, model)]
    return sorted(found, key=lambda version: int(version.version), reverse=True)


def made_by_runs(root: Path) -> dict[str, Version]:
    """The newest version of each run of the pipeline that registered one, by the id of the run."""
    client = tracking.connect(root)
    found = sorted(client.search_model_versions(), key=lambda version: version.creation_timestamp)
    return {version.tags[registry.PIPELINE_RUN]: _version(version, {}) for version in found if _is_of_a_run(version)}


def find(root: Path, model: str, which: str) -> Version:
    """The version of this number or alias; RegistryError says which there are."""
    client = tracking.connect(root)
    return _version(registry.look_up(client, model, which), _aliases(client, model))


@deferred()
def promote(root: Path, model: str, which: str) -> tuple[str, str]:
    """Make a version champion by hand; returns the champion before (empty if there was none) and the one now."""
    client = tracking.connect(root)
    version = registry.look_up(client, model, which)
    before = registry.champion_version(client, model)
    if before is not None and before.version == version.version:
        return str(before.version), str(version.version)
    today = datetime.now().date().isoformat()
    registry.set_tags(client, version, {registry.REASON: f"version {version.version} was promoted by hand on {today}"})
    if registry.WITHDRAWN in version.tags:
        client.delete_model_version_tag(model, version.version, registry.WITHDRAWN)
    registry.make_champion(client, version, before)
    return str(before.version) if before else "", str(version.version)


@deferred()
def rollback(root: Path, model: str) -> tuple[str, str]:
    """Make the champion before the present one champion again; returns both. The gate does not bring it back."""
    client = tracking.connect(root)
    present = registry.champion_version(client, model)
    if present is None:
        raise RegistryError(f"{model} has no champion, so there is nothing to go back to", "nightshift promote VERSION")
    target = _before(client, present)
    registry.set_tags(client, present, {registry.WITHDRAWN: datetime.now().date().isoformat()})
    client.set_registered_model_alias(model, CHAMPION, target.version)
    return str(present.version), str(target.version)


def _replaced_by(version: ModelVersion) -> list[str]:
    """The champions that it replaced, the last one first: it may have become champion more than once."""
    earlier = version.tags.get(registry.REPLACED, "").split()
    return [number for number in (version.tags.get(registry.PREVIOUS), *reversed(earlier)) if number]


def _before(client: MlflowClient, present: ModelVersion) -> ModelVersion:
    """The last champion before this one that was neither withdrawn nor deleted."""
    known = {str(version.version): version for version in registry.versions(client, present.name)}
    seen = {str(present.version)}
    waiting = _replaced_by(present)
    while waiting:
        number = waiting.pop(0)
        if number in seen:
            continue
        seen.add(number)
        found = known.get(number)
        if found and registry.WITHDRAWN not in found.tags:
            return found
        waiting = [*(_replaced_by(found) if found else []), *waiting]
    what = "no champion before it" if len(seen) == 1 else "no champion before it that was not withdrawn or deleted"
    raise RegistryError(
        f"version {present.version} had {what}, so there is nothing to go back to", "nightshift promote VERSION"
    )


def outcomes(root: Path, version: Version, grid: str, code: str) -> dict[Cell, bool]:
    """Success by task and init state on a grid; empty if it has not played it, or last by other code than `code`."""
    client = tracking.connect(root)
    registry.use(client)
    found = registry.outcomes_of(client, client.get_model_version(version.model, version.version), grid, code)
    return solved(found) if found else {}


def params_of(root: Path, version: Version) -> Mapping[str, str]:
    """Every param of the run that made it, by dotted name; empty if the run is gone."""
    return _params(tracking.connect(root), version.pipeline_run)


def changed_params(root: Path, version: Version, since: Version) -> list[str]:
    """Params that differ between the runs of two versions, in words. Example: ["sft.steps 300 → 500"]"""
    client = tracking.connect(root)
    return tracking.changes(_params(client, since.pipeline_run), _params(client, version.pipeline_run))


def runs(root: Path, limit: int) -> list[PipelineRun]:
    """The newest runs of the pipeline."""
    return _runs(root, "pipeline", limit)


def _runs(root: Path, kind: RunKind, limit: int) -> list[PipelineRun]:
    client = tracking.connect(root)
    experiment = client.get_experiment_by_name(tracking.EXPERIMENT)
    if not experiment:
        return []
    condition, order = f"tags.`{tracking.STAGE}` = '{kind}'", ["attributes.start_time DESC"]
    found = client.search_runs([experiment.experiment_id], condition, order_by=order, max_results=limit)
    return [_run(run) for run in found]


def find_run(root: Path, prefix: str) -> PipelineRun:
    """The run of the pipeline, or the trial of a sweep, whose id begins so, or that has this name in MLflow."""
    found = matching_runs(root, prefix)
    if len(found) != 1:
        what = "no run of the pipeline has" if not found else "several runs of the pipeline have"
        raise RegistryError(f"{what} an id that begins with {prefix!r}", "nightshift runs shows them")
    return found[0]


def matching_runs(root: Path, prefix: str) -> list[PipelineRun]:
    """Runs of the pipeline and trials whose id begins so, or that have this name."""
    everything = [*_runs(root, "pipeline", EVERY), *_runs(root, "trial", EVERY)]
    return [run for run in everything if run.run_id.startswith(prefix) or run.name == prefix]


def _is_of_a_run(version: ModelVersion) -> bool:
    return bool(version.tags.get(registry.PIPELINE_RUN))


def _version(version: ModelVersion, aliases: Mapping[str, list[str]]) -> Version:
    tags = version.tags
    played = registry.EPISODES in tags and int(tags[registry.EPISODES]) > 0
    return Version(
        model=version.name,
        version=str(version.version),
        aliases=tuple(sorted(aliases.get(str(version.version), []))),
        candidate=tags.get(registry.CANDIDATE, ""),
        created=datetime.fromtimestamp(version.creation_timestamp / 1000),
        result=Rate(int(tags[registry.SUCCESSES]), int(tags[registry.EPISODES])) if played else None,
        grid=tags.get(registry.GRID, ""),
        verdict=tags.get(registry.VERDICT, ""),
        reason=tags.get(registry.REASON, ""),
        previous=tags.get(registry.PREVIOUS, ""),
        withdrawn=tags.get(registry.WITHDRAWN, ""),
        dataset=tags.get(registry.DATASET, ""),
        episodes=tags.get(registry.DATASET_EPISODES, ""),
        commit=tags.get(registry.COMMIT, ""),
        started_from=tags.get(registry.STARTED_FROM, ""),
        policy_package=tags.get(registry.POLICY_PACKAGE, ""),
        weights=tags.get(registry.WEIGHTS, ""),
        run_id=tags.get(registry.RUN, ""),
        pipeline_run=tags.get(registry.PIPELINE_RUN, ""),
    )


def _aliases(client: MlflowClient, model: str) -> dict[str, list[str]]:
    """Aliases by version."""
    by_version: dict[str, list[str]] = {}
    for alias, version in registry.aliases(client, model).items():
        by_version.setdefault(version, []).append(alias)
    return by_version


def _params(client: MlflowClient, run_id: str) -> Mapping[str, str]:
    try:
        return dict(client.get_run(run_id).data.params) if run_id else {}
    except MlflowException:
        return {}


def _run(run: Run) -> PipelineRun:
    metrics, tags = run.data.metrics, run.data.tags
    ended = run.info.end_time
    return PipelineRun(
        run_id=run.info.run_id,
        name=run.info.run_name,
        status=run.info.status.lower(),
        started=datetime.fromtimestamp(run.info.start_time / 1000),
        seconds=(ended - run.info.start_time) / 1000 if ended else None,
        commit=tags.get(tracking.COMMIT, ""),
        success=metrics.get(metric_names.SUCCESS),
        low=metrics.get(metric_names.SUCCESS_LOW),
        high=metrics.get(metric_names.SUCCESS_HIGH),
        version=tags.get("model.version", ""),
        promoted=bool(metrics.get(metric_names.PROMOTED)),
        changed=tags.get(tracking.CHANGED, ""),
        params=dict(run.data.params),
    )
