"""How a run of a flow ends, whichever way it ends, and what Prefect shows of it.

Ctrl-C, SIGTERM and a cancel in Prefect end it as Cancelled. A killed run cannot report its end: the next run,
or the next start of `nightshift serve`, finds that its process is gone, and marks it Crashed. Labels on the run name
the process, its machine and its folder.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast
from uuid import UUID

import psutil
from httpx import TransportError
from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType, TaskRun
from prefect.exceptions import CancelledRun, PrefectHTTPStatusError
from prefect.runtime import flow_run
from prefect.states import Cancelled, Crashed

from nightshift import interrupts
from nightshift.errors import Busy
from nightshift.pipeline import nightly, notify
from nightshift.pipeline.run import LOCK
from nightshift.project import locks
from tasks._stage import STOPPED, Stopped

P = ParamSpec("P")
R = TypeVar("R")

FLOWS = ["pipeline", "nightly"]
REFUSED = "Refused"
"""The state of a run that did not start, because another run was working in the folder."""
SERVED_BY = "NIGHTSHIFT_SERVED_BY"
"""Environment variable of runs that `nightshift serve` starts: its process ID. They end when that process ends."""
_OPEN = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]
_ENDED = [StateType.COMPLETED, StateType.FAILED, StateType.CRASHED, StateType.CANCELLED]
_RUNNING = TaskRunFilter(state=TaskRunFilterState(type=TaskRunFilterStateType(any_=[StateType.RUNNING])))
_RUN_HAS_ENDED = "its run has ended"
_SECONDS_TO_ARRIVE = 60.0
_SECONDS_TO_END_TASKS = 5.0
_POLL_SECONDS = 0.1
_HOST, _FOLDER, _PROCESS, _STARTED = (f"nightshift.{name}" for name in ("host", "folder", "process", "started"))
TAKEN_UP_HERE = f"{_HOST}={socket.gethostname()}"
"""Tag of the runs that this machine starts. It is set before the process of the run starts and writes the labels."""
_SECONDS_TO_BEGIN = 600
"""A run that this machine has taken up gets its labels within this time; one without labels after it never started."""
_CLOCK_TOLERANCE = 60.0
"""Seconds by which two readings of when a process started may differ: the clock may have been set in between."""


def labelled() -> str:
    """`flow_run_name` of a flow: the name that its run has already.

    Prefect asks for it before the run is Running, which is why the labels are written here: a run that is killed as
    soon as it is Running has them.
    """
    with get_client(sync_client=True) as client:
        client.update_flow_run_labels(flow_run.id, _labels())
    return str(flow_run.name)


def orderly(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a flow's function, below @flow: leftovers are marked first; being stopped, or finding another run
    in the way, becomes a state instead of an error; and people are told how it ended."""

    @functools.wraps(function)
    def run(*arguments: P.args, **keywords: P.kwargs) -> R:
        started = datetime.now(UTC)
        try:
            _begin()
            result = function(*arguments, **keywords)
            _end_tasks(StateType.COMPLETED)
        except Busy as busy:
            nightly.refused(Path.cwd(), started, busy)
            # Who calls this flow in the same process, as `nightly` does, gets the data of the state raised.
            return cast(R, Cancelled(name=REFUSED, message=busy.what, data=busy))
        except (*Stopped, CancelledRun):
            return cast(R, _stopped())
        except Exception as error:
            if interrupts.caused(error):
                return cast(R, _stopped())
            if not isinstance(error, TransportError):  # the server is gone
                with contextlib.suppress(PrefectHTTPStatusError):  # nor can it store that: `error` is what to tell
                    _end_tasks(StateType.FAILED)
            if _is_outermost():
                nightly.failed(Path.cwd(), started, error)
            raise
        if _is_outermost() and isinstance(result, list):
            notify.finished(Path.cwd(), result)
        return result

    # Prefect reads the types of a flow's parameters; the names in them are those of the function's module.
    run.__signature__ = inspect.signature(function, eval_str=True)  # type: ignore[attr-defined]
    run.__annotations__ = inspect.get_annotations(function, eval_str=True)
    return run


def _stopped() -> State[None]:
    _end_tasks(StateType.CANCELLED)
    return Cancelled(message=STOPPED)


def _begin() -> None:
    logging.getLogger("prefect.flow_runs").addFilter(_is_news)
    report_leftovers()
    _end_with_server()


def _end_tasks(kind: StateType) -> None:
    """End the tasks of this run that Prefect still shows as running, with the state of the run. None of them works any
    more; events that are on their way have a few seconds to arrive.

    If the clock is set back while a task runs, Prefect ignores the end of the task: it is older than its start.
    """
    deadline = time.monotonic() + _SECONDS_TO_END_TASKS
    with get_client(sync_client=True) as client:
        while (left := _running_tasks(client, UUID(flow_run.id))) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        for task in left:
            ended: State[None] = State(type=kind, message=_RUN_HAS_ENDED)
            client.set_task_run_state(task.id, ended, force=True)


def _running_tasks(client: SyncPrefectClient, run: UUID) -> list[TaskRun]:
    return client.read_task_runs(
        flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run])),
        task_run_filter=_RUNNING,
    )


def _is_outermost() -> bool:
    """False for a flow that another flow runs."""
    return not flow_run.parent_flow_run_id


def hours_late() -> float:
    """How long after its time on the clock this run began: the machine was off, or another run came first.

    One that is tried again has begun before, and somebody may have pressed Retry much later.
    """
    if flow_run.run_count > 1:
        return 0.0
    due = flow_run.scheduled_start_time
    return float((datetime.now(due.tzinfo) - due).total_seconds() / 3600)


def report_leftovers() -> None:
    """Mark the runs that were killed, and notify people: a killed run could not do that itself."""
    with get_client(sync_client=True) as client:
        dead = mark_leftovers(client)
    notify.killed(Path.cwd(), [run.name for run in dead if run.parent_task_run_id is None])


def tell_of_crash(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Hook of a flow: `nightshift serve` has found that the process of a run was killed, and marked it as Crashed. The
    next run finds nothing to mark any more.

    Prefect calls it in the process of the run as well, which then is alive, and for the flow that another one runs.
    """
    if flow_run.parent_task_run_id is None and flow_run.labels.get(_PROCESS) != os.getpid():
        notify.killed(Path.cwd(), [flow_run.name])


def mark_leftovers(client: SyncPrefectClient) -> list[FlowRun]:
    """Mark the runs of this folder whose process is gone, or never came to life, as Crashed; returns them."""
    found = client.read_flow_runs(
        flow_filter=FlowFilter(name=FlowFilterName(any_=FLOWS)),
        flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_OPEN))),
    )
    dead = [run for run in found if (_is_dead(run) if _PROCESS in run.labels else _never_began(run))]
    for run in dead:
        why = f"process {run.labels[_PROCESS]} was killed" if _PROCESS in run.labels else "its process never began"
        crashed: State[None] = Crashed(message=why)
        for task in client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run.id]))):
            if task.state is None or not task.state.is_final():
                client.set_task_run_state(task.id, crashed, force=True)
        client.set_flow_run_state(run.id, crashed, force=True)
    _end_tasks_of_ended_runs(client)
    return dead


def _end_tasks_of_ended_runs(client: SyncPrefectClient) -> None:
    """Tasks of this machine that are shown as running although their run has ended: its process was killed, or its
    server ended, before it could end them."""
    left = client.read_task_runs(
        flow_filter=FlowFilter(name=FlowFilterName(any_=FLOWS)),
        flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_ENDED))),
        task_run_filter=_RUNNING,
    )
    for task in left:
        run = client.read_flow_run(task.flow_run_id) if task.flow_run_id else None
        if run and run.labels.get(_HOST) == socket.gethostname() and run.state and _is_settled(run.state):
            ended: State[None] = State(type=run.state.type, message=_RUN_HAS_ENDED)
            client.set_task_run_state(task.id, ended, force=True)


def _is_settled(state: State[Any]) -> bool:
    """Whether the last events of a run with this state have arrived; the clock may have been set back since."""
    return abs(_age(state)) > _SECONDS_TO_ARRIVE


def _is_news(record: logging.LogRecord) -> bool:
    """False for the traceback that Prefect's engine logs of a run that has ended as Cancelled or Refused."""
    return not (record.exc_info and isinstance(record.exc_info[1], (CancelledRun, Busy)))


def _end_with_server() -> None:
    """End this run when `nightshift serve` ends: the Prefect server that the run reports to ends with it."""
    if SERVED_BY in os.environ:
        interrupts.end_with(int(os.environ[SERVED_BY]))


def _age(state: State[Any]) -> float:
    return float((datetime.now(state.timestamp.tzinfo) - state.timestamp).total_seconds())


def _labels() -> dict[str, Any]:
    return {
        _HOST: socket.gethostname(),
        _FOLDER: str(Path.cwd()),
        _PROCESS: os.getpid(),
        _STARTED: psutil.Process().create_time(),
    }


def _never_began(run: FlowRun) -> bool:
    """Whether a run without labels was taken up by this machine and its process never came to life.

    A shared server has runs of other people whose flows have the same names, and of other machines: they stay.
    """
    if TAKEN_UP_HERE not in run.tags or run.state is None or run.state.type is not StateType.PENDING:
        return False
    return _age(run.state) > _SECONDS_TO_BEGIN


def _is_dead(run: FlowRun) -> bool:
    """Whether it is a run of this folder whose process is gone; a later process with the same number is another one.

    While a run holds the lock of the folder, it may be this one: processes of another container are not seen here.
    """
    labels = run.labels
    folder = Path(str(labels[_FOLDER]))
    if labels.get(_HOST) != socket.gethostname() or not _is_ours(folder) or locks.is_held(folder / LOCK):
        return False
    try:
        started = psutil.Process(int(labels[_PROCESS])).create_time()
    except psutil.NoSuchProcess:
        return True
    return bool(abs(started - float(labels[_STARTED])) > _CLOCK_TOLERANCE)


def _is_ours(folder: Path) -> bool:
    """Whether runs of that folder are this project's. On a shared server other projects mark and report their own; a
    folder that does not exist may be the one that this project was moved from."""
    return folder == Path.cwd() or not folder.exists()
