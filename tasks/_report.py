"""The report of a run, linked on the flow's page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prefect.artifacts import create_link_artifact

from nightshift.pipeline.report import writing
from nightshift.pipeline.run import Session
from nightshift.project import paths


@contextmanager
def reporting(session: Session) -> Iterator[None]:
    """Write the report when the stages are done, or one of them failed."""
    kept: list[str] = []
    try:
        with writing.reporting(session) as kept:
            yield
    finally:
        for address in kept:
            create_link_artifact(address, key="report", link_text="report", description=f"also {paths.REPORT}")
