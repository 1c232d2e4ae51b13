"""The Prefect task of the stage `collect`."""

from __future__ import annotations

from nightshift.pipeline.run import Session
from tasks._stage import Result, ensure, stage_task


@stage_task("collect", hours=4)
def collect(session: Session, *after: Result) -> Result:
    """The scripted expert plays; its successes become demos."""
    return ensure("collect", session)
