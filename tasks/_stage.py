"""What the tasks of all stages share: how they are retried, what Prefect is told and shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prefect import Task
from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.states import Cancelled, Completed
from prefect.task_engine import TaskRunTimeoutError

from nightshift import interrupts
from nightshift.errors import ProjectError, RolloutError, Unreachable
from nightshift.pipeline import run
from nightshift.pipeline.run import Session, StageResult
from tasks._progress import shown

Result = StageResult | State[StageResult]
"""A stage that ran gives its result; any other a state that Prefect shows as Cached, Restored or Skipped."""

Stopped = (KeyboardInterrupt, TerminationSignal, SystemExit)
"""Ctrl-C; SIGTERM, by which Prefect cancels too; SIGTERM while Ray starts, which has its own handler then."""
STOPPED = "stopped; run again to resume"


class StageTask(Task[..., Result]):
    """A task that Prefect shows as Cancelled when its stage is stopped, and that stops its flow then."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        try:
            result = super().__call__(*arguments, **keywords)
        except TaskRunTimeoutError:
            hours = (self.timeout_seconds or 0) / 3600
            raise ProjectError(
                f"{self.name} took longer than its {hours:.3g} h",
                f"run again: it resumes. If it was slow and did not hang, raise hours in tasks/{self.name}.py",
            ) from None
        if was_stopped(result):
            raise KeyboardInterrupt
        return result


def was_stopped(result: Result) -> bool:
    """Whether the stage was stopped before it had a result."""
    return isinstance(result, State) and result.is_cancelled()


def stage_task(stage: str, *, hours: float) -> Callable[[Callable[..., Result]], StageTask]:
    """Decorator of a stage's task. DVC alone decides what is cached, so Prefect's own cache stays off."""
    return lambda function: StageTask(
        function,
        name=stage,
        task_run_name=stage,
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=2,
        retry_delay_seconds=[10, 60],
        retry_condition_fn=worth_another_try,
        timeout_seconds=hours * 3600,
        tags=["nightshift"],
    )


def worth_another_try(_: Any, __: Any, state: State[Any]) -> bool:
    """Errors of simulators and servers may be temporary; any other error would occur again, as would the timeout of the
    task itself."""
    error = state.result(raise_on_failure=False)
    if isinstance(error, TaskRunTimeoutError):
        return False
    return isinstance(error, RolloutError | Unreachable | ConnectionError | TimeoutError)


def ensure(stage: str, session: Session) -> Result:
    """Run the stage unless its result is cached, and show the result on Prefect's page."""
    try:
        with shown(stage):
            result = run.ensure(stage, session)
    except Stopped:
        return Cancelled(message=STOPPED)
    except Exception as error:
        if not interrupts.caused(error):
            raise
        return Cancelled(message=STOPPED)
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
