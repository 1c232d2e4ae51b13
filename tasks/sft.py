"""The Prefect task of the stage `sft`."""

from __future__ import annotations

from nightshift.pipeline.run import Session
from tasks._stage import Result, ensure, stage_task


@stage_task("sft", hours=12)
def sft(session: Session, *after: Result) -> Result:
    """Behaviour cloning: the policy that reinforcement learning starts from."""
    return ensure("sft", session)
