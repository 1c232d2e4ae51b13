"""Garbage collection: checkpoints, journals and clones that no run will use, since params, code or inputs changed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nightshift.errors import Busy
from nightshift.pipeline.run import Session, fingerprint
from nightshift.project import locks, paths, playing
from nightshift.reports.candidates import policies_here

CURRENT = "current"
INTERRUPTED = "its run can be resumed with its params put back"
UNFINISHED = "its sweep can be resumed at its commit"


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """The work in progress of one stage under one fingerprint, what one policy has played, or the clones of the sweeps
    of one commit."""

    path: Path
    """`.state/<stage>/<fingerprint>`, `.state/played/<digest>.jsonl` or `.state/sweep/<commit>`"""
    size: int
    """Bytes."""
    kept_for: str
    """Why it stays; empty if it goes."""


def collect(root: Path, *, dry_run: bool, everything: bool) -> list[Leftover]:
    """Remove each stage's checkpoints but those of its current fingerprint and of runs to resume, what policies have
    played but those that are here, and the clones of sweeps but those of the current commit and of sweeps to resume.

    `everything` includes what could be resumed. Registered versions need no checkpoints: their weights are in MLflow's
    store. Trials need no clones: their runs are in MLflow, and their results in DVC's cache. Metrics stay: they are
    small, and the record of what was trained.
    """
    with Session(root) as session, locks.held(session.root / paths.SWEEP_LOCK, _sweeping):
        found = [
            *_checkpoints(session, everything=everything),
            *_journals(session),
            *_clones(session, everything=everything),
        ]
        for leftover in found:
            if not dry_run and not leftover.kept_for:
                path = session.root / leftover.path
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return found


def _sweeping(holder: str) -> Busy:
    return Busy(f"a sweep (process {holder}) is running", f"wait for it, or kill {holder}")


def _checkpoints(session: Session, *, everything: bool) -> Iterator[Leftover]:
    folders = [path for stage in session.graph for path in sorted((session.root / paths.STATE / stage).glob("*/"))]
    reasons = _reasons_to_keep(session, everything=everything) if folders else {}
    for folder in folders:
        yield _leftover(session, folder, reasons.get(folder.name, ""))


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


def _journals(session: Session) -> Iterator[Leftover]:
    journals = sorted((session.root / paths.PLAYED).glob("*"))  # also what a kill left half-written
    if not journals:
        return
    current = playing.evaluation(session.root, session.params.env, session.params.evaluate)
    used = {session.root / playing.journal(current, policy) for policy in policies_here(session.root)}
    for journal in journals:
        yield _leftover(session, journal, CURRENT if journal in used else "")


def _clones(session: Session, *, everything: bool) -> Iterator[Leftover]:
    for folder in sorted((session.root / paths.SWEEPS).glob("*/")):
        reason = "" if everything or _is_finished(folder) else UNFINISHED
        yield _leftover(session, folder, CURRENT if folder.name == session.commit.removesuffix("+") else reason)


def _is_finished(sweep: Path) -> bool:
    return all((clone / paths.TRIAL).exists() for clone in sweep.glob("*/"))


def _leftover(session: Session, path: Path, kept_for: str) -> Leftover:
    return Leftover(path=path.relative_to(session.root), size=_size(path), kept_for=kept_for)


def _size(path: Path) -> int:
    """What is linked to stays, and does not count."""
    return sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file() and not file.is_symlink())
