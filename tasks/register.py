"""The Prefect task of the stage `register`."""

from __future__ import annotations

from prefect.artifacts import create_link_artifact

from nightshift.pipeline import summary
from nightshift.pipeline.run import Session
from tasks._stage import Result, ensure, stage_task, was_stopped


@stage_task("register", hours=1)
def register(session: Session, *after: Result) -> Result:
    """The best candidate becomes a version in MLflow's registry."""
    result = ensure("register", session)
    page = summary.model_page(session.root)
    if page and not was_stopped(result):
        create_link_artifact(
            page, key="model", link_text="the model in MLflow", description=summary.decision(session.root)
        )
    return result
