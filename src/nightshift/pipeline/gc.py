"""Garbage collection of checkpoints: params, code or inputs changed, so no run will resume them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from nightshift.pipeline.run import Session, fingerprint
from nightshift.project import paths

CURRENT = "current"
INTERRUPTED = "its run can be resumed with its params put back"


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """The work in progress of one stage under one fingerprint."""

    path: Path
    """`.state/<stage>/<fingerprint>`"""
    size: int
    """Bytes."""
    kept_for: str
    """Why it stays; empty if it goes."""


def collect(root: Path, *, dry_run: bool, everything: bool) -> list[Checkpoints]:
    """Remove each stage's checkpoints but those of its current fingerprint and of runs to resume.

    `everything` includes runs to resume. Registered versions need no checkpoints: their weights are in MLflow's store.
    Metrics stay: they are small, and the record of what was trained.
    """
    with Session(root) as session:
        folders = [path for stage in session.graph for path in sorted((session.root / paths.STATE / stage).glob("*/"))]
        reasons = _reasons_to_keep(session, everything=everything) if folders else {}
        found = [
            Checkpoints(
                path=folder.relative_to(session.root), size=_size(folder), kept_for=reasons.get(folder.name, "")
            )
            for folder in folders
        ]
        for checkpoints in found:
            if not dry_run and not checkpoints.kept_for:
                shutil.rmtree(session.root / checkpoints.path)
        return found


def _reasons_to_keep(session: Session, *, everything: bool) -> dict[str, str]:
    """By the name of a checkpoint folder. A fingerprint includes its stage, so its name alone is enough."""
    from nightshift.adapters import mlflow_tracking

    client = mlflow_tracking.connect(session.root)
    interrupted = set() if everything else mlflow_tracking.unfinished_fingerprints(client)
    fingerprints = {
        **dict.fromkeys(interrupted, INTERRUPTED),
        **{fingerprint(stage, session): CURRENT for stage in session.graph},
    }
    return {paths.short(full): reason for full, reason in fingerprints.items()}


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
