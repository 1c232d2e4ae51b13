"""The pipeline every night, on new demos: a night in which nothing changed ends in seconds and says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows.lifecycle import hours_late, orderly
from flows.pipeline import pipeline
from nightshift.pipeline import nightly as night
from nightshift.pipeline import notify
from nightshift.pipeline.run import StageResult, stale, statuses
from nightshift.project import environment

NOTHING_TO_DO = "Nothing to do"
"""Name of the state of such a night."""


@flow(name="nightly", persist_result=False)
@orderly
def nightly(catch_up_hours: float | None = None) -> list[StageResult] | State[Any]:
    """Import new demos, run the pipeline if anything is stale, commit the new versions.

    A night that can only begin later than `catch_up_hours`, since the machine was off, is left out; prefect.yaml states
    the number.
    """
    if catch_up_hours is not None and hours_late() > catch_up_hours:
        return Completed(name="Missed", message=f"{hours_late():.1f} h late, and catch_up_hours is {catch_up_hours:g}")
    root, log = Path.cwd(), get_run_logger()
    environment.apply(root)
    for sentence in night.prepare(root):
        log.info(sentence)
    if not stale(statuses(root)):
        notify.finished(root, [])
        return Completed(name=NOTHING_TO_DO, message=night.NOTHING_TO_DO, data=[])
    results = pipeline()
    if sentence := night.conclude(root):
        log.info(sentence)
    return results
