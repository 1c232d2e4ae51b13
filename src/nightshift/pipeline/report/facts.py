"""Everything that a report shows, read from the project's files and from MLflow."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nightshift import config, files, policies
from nightshift.adapters.tracking import Change, by_name, changes
from nightshift.data import dataset_store
from nightshift.errors import NightshiftError
from nightshift.pipeline import results
from nightshift.pipeline.report import record as run_record
from nightshift.pipeline.report.record import RunRecord
from nightshift.pipeline.run import Session, machine_usage, timings
from nightshift.project import graph, paths, repository
from nightshift.reports import history
from nightshift.reports.history import History
from nightshift.statistics.paired import Paired, solved

if TYPE_CHECKING:
    from nightshift.adapters.mlflow_reports import VersionRecord

_COMMITS = 12
"""Listed of those since the champion."""


@dataclass(frozen=True, kw_only=True)
class Champion:
    """The version that was champion when this one was registered, and how this one compares with it."""

    record: VersionRecord
    paired: Paired | None
    """This run's best policy against it; None where the champion was not evaluated on this grid."""
    params: Sequence[Change]
    """That it was trained with differently."""
    commits: Sequence[str]
    """Subjects of the commits since, newest first."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    root: Path
    params: config.Params
    commit: str
    record: RunRecord | None
    """Of the run whose results these are."""
    refusal: RunRecord | None
    """Of the last run, if it was refused before its first stage."""
    seconds: Mapping[str, float]
    """Of each stage when it last ran."""
    used: Mapping[str, Mapping[str, float]]
    """Of the machine, by stage."""
    evaluation: Mapping[str, Any]
    outcomes: Mapping[str, Any]
    receipt: Mapping[str, Any]
    histories: Mapping[str, History]
    dataset: Mapping[str, Any]
    dataset_md5: str
    champion: Champion | None
    robustness: Mapping[str, Any]
    """What `nightshift robustness` found last; empty if that was of no policy of this run, nor of the champion."""

    @property
    def best(self) -> Mapping[str, Any] | None:
        return self.candidate(self.evaluation["best"]) if self.evaluation else None

    @property
    def clone(self) -> Mapping[str, Any] | None:
        return self.evaluation["candidates"][0] if self.evaluation else None

    def candidate(self, name: str) -> Mapping[str, Any] | None:
        return next((one for one in self.evaluation.get("candidates", ()) if one["name"] == name), None)


def gather(root: Path) -> Facts:
    """The facts of the last run here that began. After a failure, results of stages that it did not reach are left
    out."""
    session = Session(root)
    record = run_record.read(root)
    reached = set(session.graph)
    if record and record.failure:
        reached = {result.stage for result in record.stages}
    found = results.read(root)
    evaluation = found.evaluation if "evaluate" in reached else {}
    outcomes = results.read_json(root / paths.EVALUATION_OUTCOMES) if evaluation else {}
    receipt = found.registration if "register" in reached else {}
    champion = _champion(session, evaluation, outcomes, receipt)
    return Facts(
        root=root,
        params=session.params,
        commit=session.commit,
        record=record,
        refusal=run_record.read_refusal(root),
        seconds=timings(root),
        used={stage: machine_usage(root).get(stage, {}) for stage in session.graph},
        evaluation=evaluation,
        outcomes=outcomes,
        receipt=receipt,
        histories=_histories(root, reached),
        dataset=_dataset(root) if "dataset" in reached else {},
        dataset_md5=graph.recorded_md5(root, paths.DATASET) if "dataset" in reached else "",
        champion=champion,
        robustness=_robustness(root, _trained(root, reached) | ({champion.record.weights} if champion else set())),
    )


def _histories(root: Path, reached: set[str]) -> dict[str, History]:
    found = {}
    for name in config.ALGORITHMS:
        try:
            read = history.read(root / paths.MODELS / name) if name in reached else None
        except NightshiftError:
            read = None
        if read:
            found[name] = read
    return found


def _trained(root: Path, reached: set[str]) -> set[str]:
    """The weights of the policies that the stages of this run made."""
    manifests = [results.read_json(root / paths.MODELS / stage / files.MANIFEST) for stage in sorted(reached)]
    sums = [manifest.get("sha256", {}).get(policies.WEIGHTS) for manifest in manifests]
    return {weights for weights in sums if weights}


def _robustness(root: Path, weights: set[str]) -> Mapping[str, Any]:
    """The last report, if its first policy has one of these weights: the next night leaves others under its name."""
    report = results.read_json(root / paths.ROBUSTNESS_REPORT)
    return report if report and report["policies"][0]["weights"] in weights else {}


def _dataset(root: Path) -> Mapping[str, Any]:
    try:
        return dataset_store.describe((root / paths.DATASET / dataset_store.INDEX).read_bytes())
    except (OSError, ValueError, KeyError):
        return {}


def _champion(
    session: Session, evaluation: Mapping[str, Any], outcomes: Mapping[str, Any], receipt: Mapping[str, Any]
) -> Champion | None:
    if not evaluation or not receipt:
        return None
    from nightshift.adapters import mlflow_registry, mlflow_reports

    model, grid = receipt["model"], evaluation["grid"]
    code = grid.get("code", mlflow_registry.UNKNOWN_CODE)
    before = mlflow_reports.champion_before(session.root, model, receipt["version"], receipt["champion"])
    record = mlflow_reports.version_record(session.root, model, before, grid["digest"], code) if before else None
    if record is None:
        return None
    ours = solved(outcomes[evaluation["best"]])
    return Champion(
        record=record,
        paired=Paired.between(ours, record.solved) if record.solved else None,
        params=_changes(record.params, session.params),
        commits=_commits(session.root, record.commit),
    )


def _changes(before: Mapping[str, str], params: config.Params) -> list[Change]:
    """Nothing is known of a version whose run is gone."""
    return changes(before, by_name(params)) if before else []


def _commits(root: Path, since: str) -> list[str]:
    try:
        log = repository.git(root, "log", "--format=%h %s", f"--max-count={_COMMITS}", f"{since.rstrip('+')}..HEAD")
    except (OSError, subprocess.CalledProcessError):
        return []
    return log.splitlines()
