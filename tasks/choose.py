"""The Prefect task of the stage `choose`."""

from __future__ import annotations

from nightshift.pipeline.run import Session
from tasks._stage import Result, ensure, stage_task


@stage_task("choose", hours=1)
def choose(session: Session, *after: Result) -> Result:
    """Which training stages run."""
    return ensure("choose", session)
