"""The pipeline every night, on new demos: a night in which nothing changed ends in seconds and says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows.lifecycle import hours_late, labelled, orderly, tell_of_crash
from flows.pipeline import pipeline
from nightshift.pipeline import nightly as night
from nightshift.pipeline import notify
from nightshift.pipeline.run import StageResult
from nightshift.project import environment

NOTHING_TO_DO = "Nothing to do"
"""Name of the state of such a night."""


@flow(name="nightly", flow_run_name=labelled, persist_result=False, on_crashed=[tell_of_crash])
@orderly
def nightly(catch_up_hours: float | None = None) -> list[StageResult] | State[Any]:
    """Import new demos, run the pipeline if anything is stale, commit the new versions.

    A night that can only begin later than `catch_up_hours`, since the machine was off, is left out; prefect.yaml states
    the number.
    """
    root = Path.cwd()
    if catch_up_hours is not None and hours_late() > catch_up_hours:
        why = f"{hours_late():.1f} h late, and catch_up_hours is {catch_up_hours:g}"
        night.missed(root, why)
        return Completed(name="Missed", message=why)
    environment.apply(root)
    results: list[StageResult] = []
    if idle := night.play(root, lambda: results.extend(pipeline()), get_run_logger().info):
        notify.finished(root, [])
        return Completed(name=NOTHING_TO_DO, message=idle, data=[])
    return results
