"""The Prefect task of the stage `states`."""

from __future__ import annotations

from nightshift.pipeline.run import Session
from tasks._stage import Result, ensure, stage_task


@stage_task("states", hours=4)
def states(session: Session, *after: Result) -> Result:
    """The init states of training, frozen and apart from those of evaluation."""
    return ensure("states", session)
