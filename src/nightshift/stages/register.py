"""Register the trained policy as a model: challenger always, champion when it is better on the same grid."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nightshift import config, files
from nightshift.adapters import mlflow_registry
from nightshift.errors import DataError
from nightshift.pipeline.job import Job
from nightshift.project import graph, paths

POLICY = "rloo"
"""The policy of the evaluation that is registered."""


def run(job: Job, *, register: config.Register) -> None:
    evaluation = _evaluation()
    overall = evaluation["policies"][POLICY]["overall"]
    candidate = mlflow_registry.Candidate(
        model=register.model,
        policy=paths.RLOO_POLICY,
        fingerprint=job.fingerprint,
        grid=evaluation["grid"]["digest"],
        successes=overall["successes"],
        episodes=overall["episodes"],
        tags=_tags(job, overall),
    )
    done = mlflow_registry.register(Path(), candidate)
    job.tracker.dataset("demos", candidate.tags["dataset.md5"], paths.DATASET)
    job.tracker.artifact(paths.EVALUATION)
    files.write_json(paths.RECEIPT, asdict(done) | {"evaluation": overall, "tags": dict(candidate.tags)})


def _evaluation() -> Any:
    path = paths.EVALUATION_REPORT
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        raise DataError(f"{path} is missing or damaged", f"rm -r {paths.EVALUATION} && nightshift run") from None


def _tags(job: Job, overall: dict[str, Any]) -> dict[str, str]:
    return {
        "dataset.md5": graph.recorded_md5(Path(), paths.DATASET),
        "code.commit": job.commit,
        "evaluation.success": f"{overall['rate']:.4f}",
        "evaluation.interval": f"{overall['low']:.4f} to {overall['high']:.4f}",
    }
