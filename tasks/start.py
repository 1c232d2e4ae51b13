"""The Prefect task of the stage `start`."""

from __future__ import annotations

from nightshift.pipeline.run import Session
from tasks._stage import Result, ensure, stage_task


@stage_task("start", hours=1)
def start(session: Session, *after: Result) -> Result:
    """The champion, if training starts from it."""
    return ensure("start", session)
