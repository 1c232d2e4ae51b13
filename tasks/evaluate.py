"""The Prefect task of the stage `evaluate`."""

from __future__ import annotations

import base64

from prefect.artifacts import create_image_artifact, create_table_artifact

from nightshift.pipeline import summary
from nightshift.pipeline.run import Session
from nightshift.project import paths
from tasks._stage import Result, ensure, stage_task, was_stopped


@stage_task("evaluate", hours=6)
def evaluate(session: Session, *after: Result) -> Result:
    """Success of every candidate on held-out init states."""
    result = ensure("evaluate", session)
    if not was_stopped(result):
        _show(session)
    return result


def _show(session: Session) -> None:
    create_table_artifact(summary.success_rows(session.root), key="success", description="95 % Wilson intervals")
    figure = session.root / paths.EVALUATION_FIGURE
    if figure.exists():
        picture = base64.b64encode(figure.read_bytes()).decode()
        create_image_artifact(f"data:image/png;base64,{picture}", key="success-plot", description="success per task")
