"""The two sides of a comparison: registered versions or runs of the pipeline, with the episodes that they played."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from nightshift.adapters import mlflow_registry as registry
from nightshift.adapters import mlflow_tracking as tracking
from nightshift.adapters import model_versions
from nightshift.adapters.model_versions import PipelineRun, Version
from nightshift.adapters.tracking import flat
from nightshift.errors import RegistryError
from nightshift.project import graph, paths
from nightshift.statistics.paired import Cell, solved

_FOLDER = paths.EVALUATION.name
_SHORT = 8
"""Characters of a run's id that tables show."""


class Grid(NamedTuple):
    """What two sides have to share to be compared state by state."""

    digest: str
    code: str
    """Digest of the code that played it (`envs.grid.played_by`)."""


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """Of a run its best candidate."""

    title: str
    """Example: "version 3" or "run 0123abcd" """
    is_champion: bool
    candidate: str
    """The stage that made it."""
    dataset: str
    """md5"""
    commit: str
    params: Mapping[str, str]
    """By dotted name; empty where its pipeline run is gone."""
    grids: Mapping[Grid, Mapping[Cell, bool]]
    """Success by task and init state of every grid that it has played; the newest evaluation first."""
    conditions: Mapping[str, Any]
    """Of its newest evaluation, by dotted name; empty where they are not on record."""

    @property
    def newest(self) -> Mapping[Cell, bool]:
        return next(iter(self.grids.values()), {})


def version(root: Path, found: Version) -> Evaluated:
    """A registered version as one side."""
    client = tracking.connect(root)
    registry.use(client)
    return Evaluated(
        title=f"version {found.version}",
        is_champion=found.is_champion,
        candidate=found.candidate,
        dataset=found.dataset,
        commit=found.commit,
        params=model_versions.params_of(root, found),
        grids=_grids(client, found),
        conditions=_conditions(_report(client, found.run_id), found.grid),
    )


def run(root: Path, found: PipelineRun) -> Evaluated:
    """A run of the pipeline, or a trial of a sweep, as one side; RegistryError if it was not evaluated."""
    client = tracking.connect(root)
    registry.use(client)
    title = f"run {found.run_id[:_SHORT]}"
    evaluation = _evaluation_of(client, found.run_id)
    report = _report(client, evaluation)
    if not report:
        raise RegistryError(f"{title} has no evaluation on record", "nightshift runs shows which have a result")
    grid = Grid(report["grid"]["digest"], report["grid"].get("code", registry.UNKNOWN_CODE))
    outcomes = registry.read_dict(evaluation, f"{_FOLDER}/{paths.EVALUATION_OUTCOMES.name}")
    return Evaluated(
        title=title,
        is_champion=False,
        candidate=report["best"],
        dataset=_dataset(client, found.run_id),
        commit=found.commit,
        params=found.params,
        grids={grid: solved(outcomes[report["best"]])},
        conditions=_conditions(report, grid.digest),
    )


def common_grid(one: Evaluated, other: Evaluated) -> Grid | None:
    """One that both have played by the same code, if possible the newest of the first."""
    return next((grid for grid in one.grids if grid in other.grids), None)


def played_by_other_code(one: Evaluated, other: Evaluated) -> bool:
    """Whether they have played a grid of one digest, but never by the same code."""
    ours, theirs = ({grid.digest for grid in side.grids} for side in (one, other))
    return common_grid(one, other) is None and not ours.isdisjoint(theirs)


def differing_conditions(one: Evaluated, other: Evaluated) -> list[str]:
    """What their newest evaluations did differently, in words. Example: ["horizon 60 → 80", "60 → 90 init states"]"""
    if not one.conditions or not other.conditions:
        return []
    names = dict.fromkeys([*other.conditions, *one.conditions])
    before, after = ({name: str(side.conditions.get(name, "none")) for name in names} for side in (other, one))
    words = [f"{name} {before[name]} → {after[name]}" for name in names if before[name] != after[name]]
    if set(one.newest) != set(other.newest):
        words.append(f"{len(other.newest)} → {len(one.newest)} init states")
    return words


def _grids(client: MlflowClient, found: Version) -> dict[Grid, Mapping[Cell, bool]]:
    version = client.get_model_version(found.model, found.version)
    ordered = sorted(registry.grids(client, version), key=lambda digest: digest != found.grid)
    played = {digest: registry.played(client, version, digest) for digest in ordered}
    return {Grid(digest, each.code): solved(each.episodes) for digest, each in played.items() if each}


def _evaluation_of(client: MlflowClient, run_id: str) -> str:
    """The run of `evaluate` whose result a run of the pipeline has: its own, or the one it found in the cache."""
    parent = client.get_run(run_id)
    own = f"tags.`{tracking.PARENT}` = '{run_id}' and tags.`{tracking.STAGE}` = 'evaluate'"
    found = client.search_runs([parent.info.experiment_id], f"{own} and attributes.status = 'FINISHED'", max_results=1)
    return str(found[0].info.run_id if found else parent.data.tags.get(f"{tracking.CACHED}.evaluate", ""))


def _report(client: MlflowClient, run_id: str) -> Mapping[str, Any]:
    """The evaluation among the artifacts of a run; empty if there is none, or it is gone."""
    path = f"{_FOLDER}/{paths.EVALUATION_REPORT.name}"
    try:
        if run_id and path in [file.path for file in client.list_artifacts(run_id, _FOLDER)]:
            return registry.read_dict(run_id, path)
    except FileNotFoundError:
        pass
    except (MlflowException, OSError) as error:
        if sentence := tracking.explained(error, client.tracking_uri):
            raise sentence from error
    return {}


def _conditions(report: Mapping[str, Any], grid: str) -> dict[str, Any]:
    """Empty if the report is of another grid than the one that is asked about."""
    if not report or report["grid"]["digest"] != grid:
        return {}
    return {"suite": report["grid"]["suite"], **flat(report["conditions"])}


def _dataset(client: MlflowClient, run_id: str) -> str:
    """From the dvc.lock that the run kept; empty if it has none."""
    if paths.DVC_LOCK.name not in [file.path for file in client.list_artifacts(run_id)]:
        return ""
    return graph.md5_in(registry.read_bytes(run_id, paths.DVC_LOCK.name).decode(), paths.DATASET)
