"""The pipeline every night, on new demos: a night in which nothing changed ends in seconds and says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows.pipeline import pipeline
from nightshift.pipeline import nightly as night
from nightshift.pipeline.run import StageResult, stale, statuses
from nightshift.project import environment

CRON = "0 2 * * *"
NOTHING_TO_DO = "Nothing to do"
"""Name of the state of such a night."""


@flow(name="nightly", persist_result=False)
def nightly() -> list[StageResult] | State[Any]:
    """Import new demos, run the pipeline if anything is stale, commit the new versions."""
    root = Path.cwd()
    environment.apply(root)
    log = get_run_logger()
    for sentence in night.prepare(root):
        log.info(sentence)
    if not stale(statuses(root)):
        return Completed(name=NOTHING_TO_DO, message=night.NOTHING_TO_DO, data=[])
    results = pipeline()
    if sentence := night.conclude(root):
        log.info(sentence)
    return results
