"""The flows on this machine: once in this process, or served on demand and by the clock."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from http import HTTPStatus
from pathlib import Path
from types import FrameType
from typing import Any, cast

from httpx import TransportError
from prefect import Flow, tags
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.deployments.runner import RunnerDeployment
from prefect.events.worker import EventsWorker
from prefect.exceptions import CancelledRun, PrefectHTTPStatusError, TerminationSignal
from prefect.logging.handlers import APILogWorker
from prefect.runner import Runner
from prefect.schedules import Schedule
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.types.entrypoint import EntrypointType

from flows.lifecycle import SERVED_BY, TAKEN_UP_HERE, report_leftovers
from flows.nightly import nightly
from flows.pipeline import pipeline
from flows.server import LOG
from nightshift import config, files, interrupts
from nightshift.errors import ConfigError, NightshiftError, ServerGone
from nightshift.pipeline.run import LOCK, Choice, StageResult
from nightshift.project import locks, paths
from nightshift.project.environment import without_password
from nightshift.telemetry.console import console

_DRAIN_SECONDS = 5
_SECONDS_TO_SCHEDULE = 120
"""The server's scheduler looks for new schedules every few seconds, and for all of them every minute."""
_NIGHTLY = f"{nightly.name}/{nightly.name}"
_STATED = ("description", "tags")
"""Keys that every deployment has."""


def run_once(choice: Choice) -> list[StageResult]:
    """The pipeline in this process."""
    logging.raiseExceptions = False  # else Prefect writes half a line into our output for each log it cannot deliver
    try:
        with tags(TAKEN_UP_HERE):
            return pipeline(choice.first, list(choice.forced))
    except (CancelledRun, TerminationSignal) as stopped:
        raise KeyboardInterrupt from stopped
    except TransportError as error:
        locks.abandon(Path.cwd() / LOCK)  # Prefect shows the run as Running: the next one marks it
        raise ServerGone(
            f"{_server()} stopped answering",
            "start it, or unset PREFECT_API_URL, and run again: what is done is cached",
        ) from error
    except PrefectHTTPStatusError as error:
        locks.abandon(Path.cwd() / LOCK)
        raise _reason(error) from error
    finally:
        # Events and logs must be sent before a temporary server ends, or the exit of this process waits for them in
        # vain. It would wait for ever for a service that a signal interrupts while it stops.
        with interrupts.deferred():
            for service in (EventsWorker, APILogWorker):
                service.drain_all(timeout=_DRAIN_SECONDS)


def _server() -> str:
    return f"the Prefect server at {without_password(str(PREFECT_API_URL.value()))}"


def _reason(refused: PrefectHTTPStatusError) -> NightshiftError:
    """The error that ended the run, if there was one before the server refused to store the final state; otherwise the
    refusal itself. Raises KeyboardInterrupt if the run was stopped."""
    error: BaseException = refused
    while error.__context__:
        error = error.__context__
        if isinstance(error, (KeyboardInterrupt, CancelledRun, TerminationSignal)):
            raise KeyboardInterrupt from refused
        if isinstance(error, NightshiftError):
            return error
        if isinstance(error, OSError) and (told := files.refusal(error)):
            return told
    status = refused.response.status_code
    why = "free some space if its disk is full, " if status >= HTTPStatus.INTERNAL_SERVER_ERROR else ""
    return ServerGone(
        f"{_server()} answers {status}: it cannot store what becomes of the run",
        f"{why}look into {LOG} if it is this project's, and run again: what is done is cached",
    )


def serve_forever(url: str) -> None:
    """Wait for runs asked for by hand (`prefect deployment run pipeline/pipeline`) and start one every night."""
    os.environ["PREFECT_API_URL"] = url  # for the processes of the runs
    os.environ[SERVED_BY] = str(os.getpid())
    signal.signal(signal.SIGINT, _terminate)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, _terminate)
    with temporary_settings({PREFECT_API_URL: url}):
        report_leftovers()
        runner = _Runner(limit=1, pause_on_shutdown=False)
        served = deployments()
        for deployment in served:
            runner.add_deployment(deployment)
        names = " and ".join(f"{deployment.flow_name}/{deployment.name}" for deployment in served)
        console.print(f"waiting for runs of {names}", soft_wrap=True)
        runner.wait_for_runs()


async def _announce_next_night() -> None:
    """Say when it begins, or that the server's scheduler has made no run for it, of which it tells its log alone."""
    waiting = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED])))
    flow = FlowFilter(name=FlowFilterName(any_=[nightly.name]))
    with contextlib.suppress(TransportError, PrefectHTTPStatusError):  # the server is gone: serve ends, and says so
        async with get_client() as client:
            if not any(one.active for one in (await client.read_deployment_by_name(_NIGHTLY)).schedules):
                return
            for _ in range(_SECONDS_TO_SCHEDULE):
                await asyncio.sleep(1)
                if found := await client.read_flow_runs(flow_filter=flow, flow_run_filter=waiting):
                    due = min(run.expected_start_time for run in found if run.expected_start_time)
                    console.print(f"the next night begins at {due.astimezone():%Y-%m-%d %H:%M %Z}", soft_wrap=True)
                    return
    console.print(f"warning: Prefect's server has scheduled no night; {LOG} says why", soft_wrap=True)


class _Runner(Runner):
    """Signals end it by cancelling its task. Prefect's handler exits wherever the signal lands: pydantic turns that
    into an error of its own, and a group of tasks into a group of errors, whose traceback asyncio prints."""

    def wait_for_runs(self) -> None:
        try:
            with contextlib.suppress(asyncio.CancelledError):
                asyncio.run(self.start())
        finally:
            interrupts.handle()  # for signals that come while the server ends

    async def start(self, run_once: bool = False, webserver: bool | None = None) -> None:
        self._task = asyncio.current_task()
        announcing = asyncio.create_task(_announce_next_night())
        try:
            await super().start(run_once, webserver)
        finally:
            announcing.cancel()

    def handle_sigterm(self, *_: Any, **__: Any) -> None:
        if self._task is not None and not (loop := self._task.get_loop()).is_closed():
            loop.call_soon_threadsafe(self._task.cancel)


def deployments() -> list[RunnerDeployment]:
    """The deployments of prefect.yaml, which is where schedule, time zone and parameters are stated."""
    content = config.read_yaml(paths.PREFECT_YAML)
    flows = (pipeline, nightly)
    try:
        stated = {entry["name"]: entry for entry in content["deployments"]}
    except (KeyError, TypeError):
        raise _incomplete("a list of deployments with a name each") from None
    if missing := [flow.name for flow in flows if flow.name not in stated]:
        raise _incomplete(f"the deployment {missing[0]}")
    if lacking := [f"{key} of {flow.name}" for flow in flows for key in _STATED if key not in stated[flow.name]]:
        raise _incomplete(", ".join(lacking))
    return [_deployment(flow, stated[flow.name]) for flow in flows]


def _incomplete(lacks: str) -> ConfigError:
    return ConfigError(f"{paths.PREFECT_YAML} does not state {lacks}", f"git diff -- {paths.PREFECT_YAML}")


def _deployment(flow: Flow[..., Any], stated: dict[str, Any]) -> RunnerDeployment:
    return cast(
        RunnerDeployment,
        flow.to_deployment(
            flow.name,
            description=stated["description"],
            tags=[*stated["tags"], TAKEN_UP_HERE],
            parameters=stated.get("parameters"),
            schedules=[Schedule(**schedule) for schedule in stated.get("schedules", [])],
            entrypoint_type=EntrypointType.MODULE_PATH,  # the file form would put flows/ itself on the path
        ),
    )


def _terminate(_: int, __: FrameType | None) -> None:
    """Ctrl-C and a closed terminal end us as `kill` does."""
    os.kill(os.getpid(), signal.SIGTERM)
