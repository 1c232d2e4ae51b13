"""The pipeline every night: a night in which neither data, params nor code changed ends in seconds."""

from __future__ import annotations

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows.lifecycle import hours_late, orderly
from flows.pipeline import pipeline
from nightshift.pipeline.run import StageResult


@flow(name="nightly", persist_result=False)
@orderly
def nightly(catch_up_hours: float | None = None) -> list[StageResult] | State[None]:
    """The pipeline, by the clock. A night that can only begin later than this, since the machine was off, is left out;
    prefect.yaml states the number."""
    if catch_up_hours is not None and hours_late() > catch_up_hours:
        return Completed(name="Missed", message=f"{hours_late():.1f} h late, and catch_up_hours is {catch_up_hours:g}")
    return pipeline()
