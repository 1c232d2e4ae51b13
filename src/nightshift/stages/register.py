"""Register the best candidate of the evaluation: challenger always, champion when the paired test calls it better."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nightshift import config, files, policies
from nightshift.adapters import mlflow_registration, mlflow_registry
from nightshift.config import CHAMPION, CHAMPION_LEFT_OUT
from nightshift.data import dataset_store
from nightshift.errors import DataError
from nightshift.pipeline.job import Job
from nightshift.policies import families
from nightshift.project import graph, packages, paths, robustness_grid
from nightshift.reports import gate


def run(job: Job, *, register: config.Register) -> None:
    evaluation, outcomes = _read(paths.EVALUATION_REPORT), _read(paths.EVALUATION_OUTCOMES)
    best = next(result for result in evaluation["candidates"] if result["name"] == evaluation["best"])
    folder = paths.MODELS / best["name"]
    sums = files.verify_folder(folder, f"rm -r {folder} and run again")
    proposal = mlflow_registration.Proposal(
        model=register.model,
        rules=gate.Rules(
            level=register.level,
            min_success_rate=register.min_success_rate,
            max_task_drop=register.max_task_drop,
            max_perturbation_drop=register.max_perturbation_drop,
        ),
        candidate=best["name"],
        policy=folder,
        store_as=register.weights,
        weights=sums[policies.WEIGHTS],
        fingerprint=job.fingerprint,
        grid=evaluation["grid"]["digest"],
        code=evaluation["grid"].get("code", mlflow_registry.UNKNOWN_CODE),
        outcomes=outcomes[best["name"]],
        tags=_lineage(job) | _package(folder),
        rematch=_rematch(evaluation, outcomes),
        left_out=_left_out(evaluation),
        robustness=_robustness() if register.max_perturbation_drop is not None else None,
    )
    done = mlflow_registration.register(Path(), proposal)
    job.tracker.artifact(paths.EVALUATION)
    evaluated = {**best["overall"], "invalid": best["invalid"]}
    judged = {"grid": proposal.grid, "outcomes": files.sha256(paths.EVALUATION_OUTCOMES), "evaluation": evaluated}
    files.write_json(paths.RECEIPT, asdict(done) | judged | {"tags": dict(proposal.tags)})


def _rematch(evaluation: Any, outcomes: Any) -> mlflow_registration.Rematch | None:
    played = evaluation.get(CHAMPION)
    if not played:
        return None
    return mlflow_registration.Rematch(
        version=played["version"], weights=played["weights"], outcomes=outcomes[CHAMPION]
    )


def _left_out(evaluation: Any) -> mlflow_registration.LeftOut | None:
    found = evaluation.get(CHAMPION_LEFT_OUT)
    return mlflow_registration.LeftOut(version=found["version"], why=found["why"]) if found else None


def _robustness() -> gate.Robustness | None:
    """What `nightshift robustness` found last, if it played the grid of params.yaml.

    It is no input of the stage: DVC does not see it, so the stage is forced after a comparison.
    """
    path = paths.ROBUSTNESS_REPORT
    if not path.exists():
        return None
    report = _read(path, "nightshift robustness challenger --against champion")
    asked = robustness_grid.digest(Path(), config.load(paths.PARAMS))
    return gate.Robustness.of(report) if report.get("grid") == asked else None


def _read(path: Path, remedy: str = f"rm -r {paths.EVALUATION} && nightshift run") -> Any:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        raise DataError(f"{path} is missing or damaged", remedy) from None


def _package(folder: Path) -> dict[str, str]:
    """The package that adds the family of the policy, as versions.yaml has it; nothing for a family of ours."""
    entry = families.plug_in(_read(folder / policies.SPEC)["family"])
    return {mlflow_registry.POLICY_PACKAGE: packages.plug_in(entry)} if entry else {}


def _lineage(job: Job) -> dict[str, str]:
    """What the policy was made of."""
    index = paths.DATASET / dataset_store.INDEX
    episodes = dataset_store.describe(index.read_bytes())["episodes"] if index.exists() else "unknown"
    start = paths.START / paths.CHAMPION_VERSION
    return {
        mlflow_registry.DATASET: graph.recorded_md5(Path(), paths.DATASET),
        mlflow_registry.DATASET_EPISODES: str(episodes),
        mlflow_registry.COMMIT: job.commit,
        **({mlflow_registry.STARTED_FROM: _read(start)["version"]} if start.exists() else {}),
    }
