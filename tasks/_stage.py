"""What the tasks of all stages share: how they are retried, what Prefect is told and shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from prefect import task
from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from nightshift.errors import RolloutError
from nightshift.pipeline import run
from nightshift.pipeline.run import Session, StageResult

Result = StageResult | State[StageResult]
"""A stage that ran gives its result; any other a state that Prefect shows as Cached, Restored or Skipped."""

F = TypeVar("F", bound=Callable[..., Any])


def stage_task(stage: str, *, hours: float) -> Callable[[F], F]:
    """Decorator of a stage's task. DVC alone decides what is cached, so Prefect's own cache stays off."""
    decorate: Any = task(
        name=stage,
        task_run_name=stage,
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=2,
        retry_delay_seconds=[5, 30],
        retry_condition_fn=worth_another_try,
        timeout_seconds=hours * 3600,
        tags=["nightshift"],
    )
    return cast("Callable[[F], F]", decorate)


def worth_another_try(_: Any, __: Any, state: State[Any]) -> bool:
    """Simulator processes die for reasons of their own; everything else would fail again the same way."""
    return isinstance(state.result(raise_on_failure=False), RolloutError)


def ensure(stage: str, session: Session) -> Result:
    """Have the stage done and show how it went."""
    result = run.ensure(stage, session)
    create_markdown_artifact(_markdown(result, session), key=f"stage-{stage}", description=f"{stage}: {result.status}")
    if result.status != "ran":
        why = ", ".join(result.reasons) if result.status == "skipped" else "its result is in dvc.lock or the run-cache"
        message = f"{stage} is {result.status}: {why}"
        return Completed(name=result.status.capitalize(), message=message, data=result)
    create_link_artifact(session.tracking.page(stage), key=f"mlflow-{stage}", link_text=f"{stage} in MLflow")
    return result


def _markdown(result: StageResult, session: Session) -> str:
    outputs = [f"| `{path}` | `{md5}` |" for path, md5 in session.store.digests(result.stage).items()]
    reasons = [f"- {reason}" for reason in result.reasons] or ["- nothing changed"]
    heading = f"**{result.status}** in {result.seconds:.1f} s, code `{session.commit}`"
    return "\n".join([heading, "", *reasons, "", "| output | md5 |", "|---|---|", *outputs])
