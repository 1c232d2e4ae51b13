"""Runs that are stopped or killed, on a real Prefect server and a real MLflow store: both say what became of them."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
from mlflow.tracking import MlflowClient
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Running

from flows import lifecycle, local
from flows.pipeline import pipeline
from flows.server import check
from nightshift import interrupts
from nightshift.adapters import mlflow_tracking
from nightshift.errors import ProjectError, ServerGone
from nightshift.pipeline import notify
from nightshift.pipeline.run import LOCK, Choice, Session, was_killed
from nightshift.project import paths
from tests.command import Command
from tests.conftest import REPOSITORY, add_store, edit, make_project, nightshift
from tests.flows.conftest import PrefectServer
from tests.flows.prefect_runs import ask, newest, state, task_states
from tests.forks import fork, read_prefect_variables
from tests.receiver import receiving
from tests.soak.faults import CLOCK, WRONG_CLOCK, can_jump
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def url(prefect_server: PrefectServer) -> str:
    return prefect_server.url


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, migrated_store: Path) -> Path:
    """A project whose pipeline trains for long."""
    root = make_project(tmp_path_factory.mktemp("life") / "project")
    add_store(root, migrated_store)
    edit(root, "sft", steps=20)
    edit(root, "rloo", iterations=4000)
    edit(root, "evaluate", init_states=2)
    return root


def training(root: Path, url: str) -> Command:
    """A run that trains."""
    before = set(root.glob(".state/rloo/*/step-*"))
    command = Command(root, "run", PREFECT_API_URL=url)
    wait_until(lambda: not command.is_running() or set(root.glob(".state/rloo/*/step-*")) - before)
    assert command.is_running(), command.wait().stderr
    return command


def mlflow_states(root: Path) -> dict[str, str]:
    """Of the pipeline and of its stage rloo."""
    client = MlflowClient(f"sqlite:///{root / paths.MLFLOW_DATABASE}")
    experiment = client.get_experiment_by_name(mlflow_tracking.EXPERIMENT)
    runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])
    return {run.data.tags[mlflow_tracking.STAGE]: run.info.status for run in runs}


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_sigterm_and_a_closed_terminal_end_a_run_like_ctrl_c(root: Path, url: str, number: signal.Signals) -> None:
    command = training(root, url)
    os.kill(command.pid, number)
    ended = command.wait()
    assert ended.returncode == 130
    said = [line for line in ended.stderr.splitlines() if not line.startswith("  ")]  # the rest is progress
    assert said == ["stopped; run again to resume"]
    run = newest(url)
    assert state(url, run.id) == "Cancelled"
    wait_until(lambda: task_states(url, run.id)["rloo"] == "Cancelled")
    states = mlflow_states(root)
    assert (states["pipeline"], states["rloo"]) == ("KILLED", "KILLED")
    assert not was_killed(root)


def test_what_was_killed_is_shown_as_dead_by_the_next_run(root: Path, url: str) -> None:
    command = training(root, url)
    wait_until(lambda: "rloo" in task_states(url, newest(url).id))
    os.killpg(command.pid, signal.SIGKILL)
    command.wait()
    dead = newest(url)
    assert state(url, dead.id) == "Running"
    assert mlflow_states(root)["rloo"] == "RUNNING"
    assert was_killed(root)
    edit(root, "rloo", iterations=1)  # another fingerprint: the run that was killed is not resumed
    done = nightshift(root, "run", PREFECT_API_URL=url)
    assert done.returncode == 0, done.stderr
    assert state(url, dead.id) == "Crashed"
    assert task_states(url, dead.id)["rloo"] == "Crashed"
    assert state(url, newest(url).id) == "Completed"
    client = MlflowClient(f"sqlite:///{root / paths.MLFLOW_DATABASE}")
    experiment = client.get_experiment_by_name(mlflow_tracking.EXPERIMENT)
    ends = [
        (run.data.tags[mlflow_tracking.STAGE], run.info.status)
        for run in client.search_runs([experiment.experiment_id])
    ]
    assert ("rloo", "KILLED") in ends
    assert ("rloo", "FINISHED") in ends
    assert not [end for end in ends if end[1] == "RUNNING"]


def test_a_night_with_nothing_to_do_marks_what_was_killed_after_its_last_stage(root: Path, url: str) -> None:
    edit(root, "rloo", iterations=1)
    done = nightshift(root, "run", PREFECT_API_URL=url)
    assert done.returncode == 0, done.stderr
    dead = dead_run(url, root)
    (root / LOCK).write_text(f"{2**22 + 1}\n")
    done = nightshift(root, "nightly", PREFECT_API_URL=url)
    assert done.returncode == 0, done.stderr
    assert "nothing to do" in done.stdout
    assert state(url, dead.id) == "Crashed"


def test_killed_runs_are_marked_and_told_by_the_project_they_are_of(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, neighbour = tmp_path / "here", tmp_path / "neighbour"
    here.mkdir()
    neighbour.mkdir()
    ours, theirs, moved = (dead_run(url, folder) for folder in (here, neighbour, tmp_path / "before the move"))
    with receiving() as (address, messages), temporary_settings({PREFECT_API_URL: url}):
        monkeypatch.setenv(notify.ADDRESSES, address)
        monkeypatch.chdir(here)
        lifecycle.report_leftovers()
        assert [state(url, run.id) for run in (ours, theirs, moved)] == ["Crashed", "Running", "Crashed"]
        monkeypatch.chdir(neighbour)
        lifecycle.report_leftovers()
    assert state(url, theirs.id) == "Crashed"
    first, second = (message["message"] for message in messages)
    assert ours.name in first and moved.name in first and first.endswith(f":{here}")
    assert theirs.name in second and second.endswith(f":{neighbour}")


def dead_run(url: str, folder: Path) -> FlowRun:
    """A run that a process began in this folder, which is gone."""
    labels: dict[str, Any] = {
        "nightshift.host": socket.gethostname(),
        "nightshift.folder": str(folder),
        "nightshift.process": 2**22 + 1,
        "nightshift.started": 0.0,
    }
    run: FlowRun = ask(url, lambda client: client.create_flow_run(pipeline, state=Running()))
    ask(url, lambda client: client.update_flow_run_labels(run.id, labels))
    return run


def run_until_it_is_running(url: str) -> None:
    """The pipeline, in a process that is killed as soon as Prefect shows it as Running."""
    os.chdir(REPOSITORY)
    os.environ["PREFECT_API_URL"] = url
    read_prefect_variables()
    pipeline.with_options(on_running=[lambda *_: os.kill(os.getpid(), signal.SIGKILL)])()


def test_a_run_that_was_killed_as_soon_as_it_was_running_is_shown_as_dead(url: str) -> None:
    killed = fork(run_until_it_is_running, url)
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    run = newest(url)
    assert run.state_name == "Running"
    assert run.id in [dead.id for dead in ask(url, lifecycle.mark_leftovers)]
    assert state(url, run.id) == "Crashed"


SETS_THE_CLOCK_BACK = """
import os, pathlib, sys
from prefect import flow, task
from prefect.runtime import flow_run
from flows.lifecycle import orderly
from tests.flows.prefect_runs import task_states
from tests.waiting import wait_until

@task(task_run_name="stage")
def stage():
    wait_until(lambda: task_states(os.environ["PREFECT_API_URL"], flow_run.id).get("stage") == "Running")
    pathlib.Path(os.environ["SOAK_CLOCK"]).write_text("-3600")
    if sys.argv[1] == "fails":
        raise ValueError("wrong params")

@flow(name="pipeline")
@orderly
def short():
    stage()

short()
"""


@pytest.mark.skipif(not can_jump(), reason="no C compiler")
@pytest.mark.parametrize(
    ("end", "shown"), [("succeeds", "Completed"), pytest.param("fails", "Failed", marks=pytest.mark.slow)]
)
def test_a_task_whose_clock_is_set_back_is_shown_as_ended_when_its_run_ends(url: str, end: str, shown: str) -> None:
    """Prefect itself shows it as running for ever: its end is older than its beginning."""
    variables = {**os.environ, **WRONG_CLOCK, "PREFECT_API_URL": url}
    try:
        subprocess.run([sys.executable, "-c", SETS_THE_CLOCK_BACK, end], cwd=REPOSITORY, env=variables, check=False)
    finally:
        CLOCK.unlink()
    run = newest(url)
    assert state(url, run.id) == shown
    assert task_states(url, run.id) == {"stage": shown}


def test_a_second_run_is_refused_in_one_sentence_before_anything_is_started(root: Path, url: str) -> None:
    edit(root, "rloo", iterations=2)
    before = newest(url).id
    with Session(root):
        refused = nightshift(root, "run", PREFECT_API_URL=url)
    assert refused.returncode == 1
    assert f"another run (process {os.getpid()}) is working" in refused.stderr
    assert newest(url).id == before


def test_a_signal_while_the_last_events_are_delivered_leaves_no_service_half_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prefect's exit would wait for such a service for ever."""
    delivered = []

    def drain_all(timeout: float) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(0)  # where Python calls the handler
        delivered.append(timeout)

    monkeypatch.setattr(logging, "raiseExceptions", True)  # put back afterwards
    monkeypatch.setattr(local, "pipeline", lambda *_: [])
    monkeypatch.setattr(EventsWorker, "drain_all", drain_all)
    interrupts.handle()
    with pytest.raises(KeyboardInterrupt):
        local.run_once(Choice())
    assert delivered


class OnlyHealthy(BaseHTTPRequestHandler):
    """A server that goes away after it was asked for its health."""

    def do_GET(self) -> None:
        if self.path.endswith("/health"):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"true")

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.mark.slow
def test_a_run_whose_own_prefect_server_is_killed_says_so_and_ends_though_prefect_has_more_to_deliver(
    tmp_path: Path,
) -> None:
    """Prefect's exit handlers alone tried for two minutes and more."""
    root = make_project(tmp_path / "project")
    command = Command(root, "run")
    wait_until(lambda: not command.is_running() or any(root.glob(f"{paths.STATE}/states/*")))
    (server,) = (p for p in psutil.Process(command.pid).children() if "flows.server" in " ".join(p.cmdline()))
    server.kill()
    wait_until(lambda: "stopped answering" in command.complained())
    told = time.monotonic()
    done = command.wait()
    assert time.monotonic() - told < 60
    assert (done.returncode, done.stderr.count("error: ")) == (1, 1)
    assert nightshift(root, "stage", "states").returncode == 0, "the lock is free"


class StoresNothing(BaseHTTPRequestHandler):
    """A server whose disk is full."""

    def do_GET(self) -> None:
        self.send_response(500)
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *_: Any) -> None:
        """Nothing."""


FULL = OSError(errno.ENOSPC, "No space left on device", "data/demos")


@pytest.mark.parametrize(
    ("ended_by", "told", "sentence"),
    [
        (ProjectError("the robot is on fire", "leave"), ProjectError, r"the robot is on fire"),
        (FULL, ProjectError, r"no space left on the disk that holds data/demos"),
        (ValueError("a defect"), ServerGone, r"the Prefect server at \S+ answers 500: it cannot store what becomes of"),
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
    ],
    ids=["error", "full disk", "unknown", "stopped"],
)
def test_a_prefect_server_that_cannot_store_how_a_run_ended_does_not_hide_what_ended_it(
    ended_by: BaseException, told: type[BaseException], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ending(*_: object) -> None:
        try:
            raise ended_by
        except type(ended_by):
            with get_client(sync_client=True) as client:
                client.set_flow_run_state(uuid4(), Running())

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging, "raiseExceptions", True)  # put back afterwards
    monkeypatch.setattr(local, "pipeline", ending)
    with HTTPServer(("127.0.0.1", 0), StoresNothing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            url = f"http://127.0.0.1:{server.server_port}/api"
            with temporary_settings({PREFECT_API_URL: url}), pytest.raises(told, match=sentence):
                local.run_once(Choice())
        finally:
            server.shutdown()


def test_a_prefect_server_that_goes_away_while_it_is_asked_is_one_sentence() -> None:
    with HTTPServer(("127.0.0.1", 0), OnlyHealthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with pytest.raises(ProjectError, match="no Prefect server answers at PREFECT_API_URL="):
                check(f"http://127.0.0.1:{server.server_port}/api")
        finally:
            server.shutdown()


def test_a_prefect_server_that_does_not_answer_is_one_sentence(root: Path) -> None:
    edit(root, "rloo", iterations=2)
    refused = nightshift(root, "run", PREFECT_API_URL="http://127.0.0.1:9/api")
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: no Prefect server answers at PREFECT_API_URL=http://127.0.0.1:9/api\n  →")
