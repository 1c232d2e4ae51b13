"""The Prefect task of the stage `dataset`."""

from __future__ import annotations

from nightshift.pipeline.run import Session
from tasks._stage import Result, ensure, stage_task


@stage_task("dataset", hours=1)
def dataset(session: Session, *after: Result) -> Result:
    """Demos become a checked, split and versioned dataset."""
    return ensure("dataset", session)
