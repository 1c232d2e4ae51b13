"""Writing a report where people look for it: the project folder, DVC's cache and the pipeline's run in MLflow."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nightshift import files
from nightshift.pipeline.report import facts as gathering
from nightshift.pipeline.report import page, record, words
from nightshift.pipeline.report.facts import Facts
from nightshift.pipeline.report.record import Failure, RunRecord
from nightshift.pipeline.run import Session
from nightshift.project import paths

logger = logging.getLogger(__name__)
_NOT_WRITTEN = "the report was not written"


@contextmanager
def reporting(session: Session) -> Iterator[list[str]]:
    """Write the report when the block ends, also by an error: then it says which stage failed, and what to do. If no
    stage had begun, it says so above the results of the run before.

    Yields a list that gets the address of the report in MLflow. A run in which nothing was stale leaves the report as
    it is, but for what it says of a refusal before, and so does one that is interrupted.
    """
    started = datetime.now(UTC)
    kept: list[str] = []
    try:
        yield kept
    except Exception as error:
        kept += _attempt(session, _record(session, started, Failure.of(error, session.current_stage)))
        raise
    if (run := _record(session, started)).changed:
        kept += _attempt(session, run)
    elif record.forget_refusal(session.root):
        with _warning(_NOT_WRITTEN):
            write(session.root)
            session.store.track(paths.REPORT)


@contextmanager
def _warning(what: str) -> Iterator[None]:
    """A report that cannot be written costs a warning: never the run, nor the error that it would have told of."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        logger.warning("%s: %s", what, error)


def _record(session: Session, started: datetime, failure: Failure | None = None) -> RunRecord:
    seconds = (datetime.now(UTC) - started).total_seconds()
    return RunRecord(started=started, seconds=seconds, stages=tuple(session.results), failure=failure)


def _attempt(session: Session, run: RunRecord) -> list[str]:
    with _warning(_NOT_WRITTEN):
        record.write(session.root, run)
        facts = write(session.root)
        with _warning(f"the report is in {paths.REPORT}, but DVC and MLflow do not both have it"):
            session.store.track(paths.REPORT)
            return [_keep_in_mlflow(session, facts, run.stamp)]
    return []


def write(root: Path) -> Facts:
    """The page of the last run, in its place in the project."""
    facts = gathering.gather(root)
    files.write_bytes(root / paths.REPORT, page.render(facts).encode())
    return facts


def _keep_in_mlflow(session: Session, facts: Facts, stamp: str) -> str:
    from nightshift.adapters import mlflow_reports

    tracking = session.tracking
    mlflow_reports.keep(session.root, tracking.parent_id, stamp, session.root / paths.REPORT, night(facts))
    return f"{tracking.page()}/artifacts/{mlflow_reports.REPORTS}/{stamp}.html"


def night(facts: Facts) -> dict[str, Any]:
    """What the page of all nights shows of this one; a run that was refused has no results."""
    if facts.refusal:
        facts = replace(facts, record=facts.refusal, refusal=None, evaluation={}, receipt={}, champion=None)
    best = facts.best
    champion = page.champion_played(facts)
    return {
        "started": facts.record.started.isoformat() if facts.record else "",
        "seconds": facts.record.seconds if facts.record else None,
        "mark": words.mark(facts),
        "promoted": words.promoted(facts),
        "verdict": words.verdict(facts),
        "changed": words.changed(facts),
        "success": dict(best["overall"]) if best else None,
        "version": facts.receipt.get("version", ""),
        "champion": champion.figures if champion and champion.paired else None,
        "grid": facts.evaluation["grid"]["digest"] if facts.evaluation else "",
        "commit": facts.commit,
    }
