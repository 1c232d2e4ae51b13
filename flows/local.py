"""The flows on this machine: once in this process, or served on demand and by the clock."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, cast

from prefect import Flow, serve
from prefect.deployments.runner import RunnerDeployment
from prefect.events.worker import EventsWorker
from prefect.exceptions import TerminationSignal
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.types.entrypoint import EntrypointType

from flows.nightly import CRON, nightly
from flows.pipeline import pipeline
from flows.server import PATIENCE_SECONDS, answers
from nightshift.errors import ProjectError
from nightshift.pipeline.run import StageResult

_DRAIN_SECONDS = 5


def run_once() -> list[StageResult]:
    """The pipeline in this process."""
    try:
        return pipeline()
    except TerminationSignal as signal:
        raise KeyboardInterrupt from signal
    finally:
        # What is still on its way must arrive before a temporary server ends: the exit would wait for it in vain.
        for service in (EventsWorker, APILogWorker):
            service.drain_all(timeout=_DRAIN_SECONDS)


def serve_forever(port: int) -> None:
    """Wait for runs asked for by hand (`prefect deployment run pipeline/pipeline`) and start one every night."""
    url = os.environ.setdefault("PREFECT_API_URL", f"http://127.0.0.1:{port}/api")
    with _server(url, port), temporary_settings({PREFECT_API_URL: url}):
        serve(_deployment(pipeline), _deployment(nightly, cron=CRON), limit=1, pause_on_shutdown=True)


def _deployment(flow: Flow[..., Any], cron: str | None = None) -> RunnerDeployment:
    # The module form: the file form would put flows/ itself on the path.
    return cast(RunnerDeployment, flow.to_deployment(flow.name, cron=cron, entrypoint_type=EntrypointType.MODULE_PATH))


@contextlib.contextmanager
def _server(url: str, port: int) -> Iterator[None]:
    """A Prefect server with its pages for as long as we serve, unless one answers already."""
    if answers(url):
        yield
        return
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _await(process, url, port)
        yield
    finally:
        process.terminate()
        process.wait(timeout=30)


def _await(process: subprocess.Popen[bytes], url: str, port: int) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not answers(url):
        if process.poll() is not None or time.monotonic() > deadline:
            raise ProjectError(f"Prefect's server did not start on port {port}", f"nightshift serve --port {port + 1}")
        time.sleep(0.5)
