"""The Prefect task of the stage `opponent`."""

from __future__ import annotations

from nightshift.pipeline.run import Session
from tasks._stage import Result, ensure, stage_task


@stage_task("opponent", hours=1)
def opponent(session: Session, *after: Result) -> Result:
    """The champion, if it has not played the grid of this evaluation."""
    return ensure("opponent", session)
