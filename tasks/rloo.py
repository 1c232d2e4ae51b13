"""The Prefect task of the stage `rloo`."""

from __future__ import annotations

from nightshift.pipeline.run import Session
from tasks._stage import Result, ensure, stage_task


@stage_task("rloo", hours=24)
def rloo(session: Session, *after: Result) -> Result:
    """Leave-one-out policy gradient on simulator rollouts."""
    return ensure("rloo", session)
