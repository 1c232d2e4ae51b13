"""`nightshift serve` as a process: it brings a Prefect server, which ends with it, and ends what it has started."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import psutil
import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.states import Cancelling

from flows.server import answers, local_url
from nightshift.pipeline import notify
from nightshift.pipeline.run import Session
from tests.command import SIGNALLED, Command
from tests.conftest import REPOSITORY, add_store, edit, make_project
from tests.faults.test_interrupt import inhabitants
from tests.flows.conftest import PrefectServer
from tests.flows.prefect_runs import ask, state, task_states
from tests.ports import free_port
from tests.receiver import receiving
from tests.waiting import wait_until

STATED = {d["name"]: d for d in yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["deployments"]}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, migrated_store: Path, prefect_server: PrefectServer) -> Path:
    root = make_project(tmp_path_factory.mktemp("serve") / "project")
    add_store(root, migrated_store)
    prefect_server.copy_database(root)
    edit(root, "sft", steps=20)
    edit(root, "rloo", iterations=4000)
    return root


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


class Serving:
    """`nightshift serve`, started again where a test has ended it: it takes half a minute of CPU time."""

    def __init__(self, root: Path, port: int, address: str) -> None:
        self._root = root
        self._port = port
        self._variables = {"PREFECT_RUNNER_POLL_FREQUENCY": "1", notify.ADDRESSES: address}
        self._command: Command | None = None

    def ready(self) -> Command:
        """A server that is ready for orders: it registers its deployments one after the other."""
        if self._command is None or not self._command.is_running():
            self._command = Command(self._root, "serve", "--port", str(self._port), **self._variables)
        wait_until(lambda: answers(local_url(self._port)))
        wait_until(
            lambda: set(STATED) <= {d.name for d in ask(local_url(self._port), SyncPrefectClient.read_deployments)}
        )
        return self._command

    def end(self) -> None:
        if self._command is not None:
            self._command.kill()
            wait_until(lambda: not answers(local_url(self._port)))


@pytest.fixture(scope="module")
def receiver() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    with receiving() as found:
        yield found


@pytest.fixture(scope="module")
def serving(root: Path, port: int, receiver: tuple[str, list[dict[str, Any]]]) -> Iterator[Serving]:
    serving = Serving(root, port, receiver[0])
    try:
        yield serving
    finally:
        serving.end()


@pytest.fixture
def server(serving: Serving) -> Command:
    return serving.ready()


def order(port: int) -> UUID:
    """Ask for a run by hand."""

    def create(client: SyncPrefectClient) -> FlowRun:
        deployment = client.read_deployment_by_name("pipeline/pipeline")
        return client.create_flow_run_from_deployment(deployment.id)

    run: FlowRun = ask(local_url(port), create)
    return run.id


def checkpoints(root: Path) -> set[Path]:
    return set(root.glob(".state/rloo/*/step-*"))


def engines(root: Path) -> list[str]:
    return [line for line in inhabitants(root) if "prefect.engine" in line]


def test_the_schedule_is_the_one_in_prefect_yaml(port: int, server: Command) -> None:
    stated = STATED["nightly"]
    nightly = ask(local_url(port), lambda client: client.read_deployment_by_name("nightly/nightly"))
    (schedule,) = nightly.schedules
    (expected,) = stated["schedules"]
    assert schedule.active and not nightly.paused
    assert (schedule.schedule.cron, schedule.schedule.timezone) == (expected["cron"], expected["timezone"])
    assert nightly.parameters == stated["parameters"]


def test_the_coming_nights_are_on_the_servers_list_of_runs(port: int, server: Command) -> None:
    """A schedule is not enough: the scheduler of the server makes the runs, and an error of it is in a log alone."""

    def coming(client: SyncPrefectClient) -> list[FlowRun]:
        waiting = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED]))
        nights = FlowFilter(name=FlowFilterName(any_=["nightly"]))
        return client.read_flow_runs(flow_filter=nights, flow_run_filter=FlowRunFilter(state=waiting))

    found = wait_until(lambda: ask(local_url(port), coming))
    (schedule,) = STATED["nightly"]["schedules"]
    timezone = ZoneInfo(schedule["timezone"])
    minute, hour = map(int, schedule["cron"].split()[:2])
    due = [run.expected_start_time.astimezone(timezone) for run in found]
    assert {(one.hour, one.minute) for one in due} == {(hour, minute)}
    wait_until(lambda: "the next night begins at " in server.printed())


def test_a_run_that_another_is_in_the_way_of_is_shown_as_refused(root: Path, port: int, server: Command) -> None:
    with Session(root):
        run = order(port)
        wait_until(lambda: state(local_url(port), run) == "Refused")
        wait_until(lambda: not engines(root))
    assert "Traceback" not in server.printed() + server.complained(), "being refused is no error"


def test_a_server_that_is_killed_takes_prefect_and_its_run_along_and_the_next_one_marks_the_run(
    root: Path, port: int, server: Command, serving: Serving, receiver: tuple[str, list[dict[str, Any]]]
) -> None:
    _, messages = receiver
    messages.clear()
    run = order(port)
    wait_until(lambda: engines(root) and state(local_url(port), run) == "Running")
    server.kill()
    wait_until(lambda: not answers(local_url(port)))
    wait_until(lambda: not inhabitants(root))
    serving.ready()
    wait_until(lambda: state(local_url(port), run) == "Crashed")
    wait_until(lambda: messages)
    assert [message["title"] for message in messages] == ["Nightshift: a run was killed"]


def test_a_run_whose_process_is_killed_is_told_at_once(
    root: Path, port: int, server: Command, receiver: tuple[str, list[dict[str, Any]]]
) -> None:
    """As by the kernel when memory runs out: Prefect marks it as Crashed, so the next run finds nothing to tell of."""
    _, messages = receiver
    messages.clear()
    run = order(port)
    wait_until(lambda: engines(root) and state(local_url(port), run) == "Running")
    for process in psutil.process_iter(["pid", "cwd", "cmdline"]):
        if process.info["cwd"] == str(root) and "prefect.engine" in " ".join(process.info["cmdline"]):
            process.kill()
    wait_until(lambda: state(local_url(port), run) == "Crashed")
    wait_until(lambda: messages)
    assert [message["title"] for message in messages] == ["Nightshift: a run was killed"]


def test_a_healthy_server_is_used_and_outlives_a_closed_terminal_of_its_user(
    root: Path, port: int, server: Command
) -> None:
    beside = Command(root, "serve", "--port", str(port))
    wait_until(lambda: "Prefect: " in beside.printed())
    assert len([line for line in inhabitants(root) if "flows.server" in line]) == 1
    os.kill(beside.pid, signal.SIGHUP)
    assert "Traceback" not in beside.wait().stderr
    wait_until(lambda: answers(local_url(port)))  # the server belongs to the other


def test_a_cancel_in_prefect_ends_a_run_as_cancelled_and_sigterm_ends_the_server_without_a_traceback(
    root: Path, port: int, server: Command
) -> None:
    before = checkpoints(root)
    run = order(port)
    wait_until(lambda: checkpoints(root) - before)
    ask(local_url(port), lambda client: client.set_flow_run_state(run, Cancelling()))
    wait_until(lambda: not engines(root))
    wait_until(lambda: state(local_url(port), run) == "Cancelled")
    assert task_states(local_url(port), run)["rloo"] == "Cancelled"
    os.kill(server.pid, signal.SIGTERM)
    ended = server.wait()
    assert "Traceback" not in ended.stdout + ended.stderr
    assert "▶ rloo" in ended.stdout
    wait_until(lambda: not answers(local_url(port)))


def test_sigterm_in_the_middle_of_a_question_for_runs_ends_serve_without_a_traceback(
    root: Path, prefect_server: PrefectServer
) -> None:
    """Wherever it lands. A second one, while the first is handled, changes nothing."""
    ended = Command(root, "serve", program=SIGNALLED, PREFECT_API_URL=prefect_server.url).wait()
    assert ended.returncode == 0
    assert "Traceback" not in ended.stderr and "never awaited" not in ended.stderr
    assert "waiting for runs of pipeline/pipeline and nightly/nightly" in ended.stdout


@pytest.mark.slow
def test_a_second_run_waits_until_the_first_has_ended(root: Path, port: int, server: Command) -> None:
    first = order(port)
    wait_until(lambda: state(local_url(port), first) == "Running")
    second = order(port)
    ask(local_url(port), lambda client: client.set_flow_run_state(first, Cancelling()))
    wait_until(lambda: state(local_url(port), first) == "Cancelled")
    wait_until(lambda: state(local_url(port), second) == "Running")
    ask(local_url(port), lambda client: client.set_flow_run_state(second, Cancelling()))
    wait_until(lambda: not engines(root))


@pytest.mark.slow
def test_a_closed_terminal_ends_the_server_prefect_and_its_run(root: Path, port: int, server: Command) -> None:
    run = order(port)
    wait_until(lambda: engines(root) and state(local_url(port), run) == "Running")
    os.kill(server.pid, signal.SIGHUP)
    ended = server.wait()
    assert "Traceback" not in ended.stdout + ended.stderr
    wait_until(lambda: not answers(local_url(port)) and not inhabitants(root))
