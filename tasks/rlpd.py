"""The Prefect task of the stage `rlpd`."""

from __future__ import annotations

from nightshift.pipeline.run import Session
from tasks._stage import Result, ensure, stage_task


@stage_task("rlpd", hours=48)
def rlpd(session: Session, *after: Result) -> Result:
    """Off-policy learning from demos and experience."""
    return ensure("rlpd", session)
