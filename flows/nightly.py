"""The pipeline every night: a night in which neither data, params nor code changed ends in seconds."""

from __future__ import annotations

from prefect import flow

from flows.pipeline import pipeline
from nightshift.pipeline.run import StageResult

CRON = "0 2 * * *"


@flow(name="nightly", persist_result=False)
def nightly() -> list[StageResult]:
    """The pipeline, by the clock."""
    return pipeline()
