"""Register the best candidate of the evaluation: challenger always, champion when the paired test calls it better."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nightshift import config, files, policies
from nightshift.adapters import mlflow_registry
from nightshift.errors import DataError
from nightshift.pipeline.job import Job
from nightshift.project import graph, paths


def run(job: Job, *, register: config.Register) -> None:
    evaluation = _read(paths.EVALUATION_REPORT)
    best = next(result for result in evaluation["candidates"] if result["name"] == evaluation["best"])
    folder = paths.MODELS / best["name"]
    sums = files.verify_folder(folder, f"rm -r {folder} and run again")
    proposal = mlflow_registry.Proposal(
        model=register.model,
        level=register.level,
        candidate=best["name"],
        policy=folder,
        weights=sums[policies.WEIGHTS],
        fingerprint=job.fingerprint,
        grid=evaluation["grid"]["digest"],
        outcomes=_read(paths.EVALUATION_OUTCOMES)[best["name"]],
        tags=_tags(job, best),
    )
    done = mlflow_registry.register(Path(), proposal)
    job.tracker.dataset("demos", proposal.tags["dataset.md5"], paths.DATASET)
    job.tracker.artifact(paths.EVALUATION)
    evaluated = {**best["overall"], "invalid": best["invalid"]}
    files.write_json(paths.RECEIPT, asdict(done) | {"evaluation": evaluated, "tags": dict(proposal.tags)})


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        raise DataError(f"{path} is missing or damaged", f"rm -r {paths.EVALUATION} && nightshift run") from None


def _tags(job: Job, best: dict[str, Any]) -> dict[str, str]:
    overall = best["overall"]
    return {
        "dataset.md5": graph.recorded_md5(Path(), paths.DATASET),
        "code.commit": job.commit,
        "evaluation.success": f"{overall['rate']:.4f}",
        "evaluation.interval": f"{overall['low']:.4f} to {overall['high']:.4f}",
    }
