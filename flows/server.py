"""A Prefect server for as long as one run lasts.

Prefect would start one by itself, but in our process group: a Ctrl-C then reaches it too, and we would wait for its
answer for minutes. Ours has a session of its own and ends when its standard input does, however this process ends.
Starting it does not import prefect, so the two processes get ready at the same time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from nightshift.errors import ProjectError
from nightshift.project import paths

PATIENCE_SECONDS = 120
LOG = paths.STATE / "prefect-server.log"


class Server:
    """A server that is starting; `wait` until it answers."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self._process = process
        self.url = url

    def wait(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not answers(self.url):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ProjectError(f"Prefect's server did not start; {LOG} says why", f"cat {LOG}")
            time.sleep(0.1)


@contextlib.contextmanager
def temporary_server() -> Iterator[Server]:
    """Start a server on a free port and make it the one that prefect, imported after this, talks to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}/api"
    command = [sys.executable, "-m", "flows.server", str(port)]
    os.environ["PREFECT_API_URL"] = url
    with LOG.open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
    try:
        yield Server(process, url)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
        process.kill()
        del os.environ["PREFECT_API_URL"]


def answers(url: str) -> bool:
    """Whether a Prefect server is healthy at this address."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as response:
            return bool(response.status == 200)  # noqa: PLR2004
    except (urllib.error.URLError, OSError):
        return False


def _serve(port: int) -> None:
    import uvicorn
    from prefect.server.api.server import create_app

    Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    uvicorn.run(create_app(ephemeral=True), host="127.0.0.1", port=port, log_level="error", lifespan="on")


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
