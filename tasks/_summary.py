"""The summary at the end of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State

from nightshift.pipeline import summary
from nightshift.pipeline.run import Session, StageResult
from tasks._stage import Result


def summarise(session: Session, results: Sequence[Result]) -> list[StageResult]:
    """Show the summary on the flow's page and return what was done with each stage."""
    stages = [_stage_result(result) for result in results]
    text = summary.markdown(summary.gather(session.root, stages))
    create_markdown_artifact(text, key="summary", description="results of the pipeline")
    return stages


def _stage_result(result: Result) -> StageResult:
    if isinstance(result, State):
        stage: StageResult = result.result()
        return stage
    return result
