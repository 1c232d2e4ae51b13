"""What a Prefect server shows of the runs on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings


def ask(url: str, question: Callable[[SyncPrefectClient], Any]) -> Any:
    with temporary_settings({PREFECT_API_URL: url}), get_client(sync_client=True) as client:
        return question(client)


def newest(url: str) -> FlowRun:
    runs = ask(url, lambda client: client.read_flow_runs())
    started: dict[float, FlowRun] = {run.start_time.timestamp(): run for run in runs if run.start_time}
    return started[max(started)]


def state(url: str, run: UUID) -> str:
    return str(ask(url, lambda client: client.read_flow_run(run)).state_name)


def task_states(url: str, run: UUID) -> dict[str, str]:
    """By name of the stage."""
    condition = FlowRunFilter(id=FlowRunFilterId(any_=[run]))
    return {task.name: task.state_name for task in ask(url, lambda c: c.read_task_runs(flow_run_filter=condition))}
