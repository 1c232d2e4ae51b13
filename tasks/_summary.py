"""The last thing a pipeline does: say what came out."""

from __future__ import annotations

from collections.abc import Sequence

from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State

from nightshift.pipeline import summary
from nightshift.pipeline.run import Outcome, Session
from tasks._stage import Result


def summarise(session: Session, results: Sequence[Result]) -> list[Outcome]:
    """Show the summary on the flow's page and hand back what became of each stage."""
    outcomes = [_outcome(result) for result in results]
    text = summary.markdown(summary.gather(session.root, outcomes))
    create_markdown_artifact(text, key="summary", description="what came out of the pipeline")
    return outcomes


def _outcome(result: Result) -> Outcome:
    if isinstance(result, State):
        outcome: Outcome = result.result()
        return outcome
    return result
