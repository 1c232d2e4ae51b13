"""Prefect servers that end with the process that started them.

Prefect would start one by itself, but in our process group: a Ctrl-C then reaches it too, and we would wait for its
answer for minutes. Ours has a session of its own and ends when its standard input does, which is when this process
ends, by whatever signal. Starting it does not import prefect, so the two processes get ready at the same time.
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

PATIENCE_SECONDS = 300
"""With 16 processes to a core Prefect takes more than two minutes to start; one that fails is noticed at once."""
LOG = paths.STATE / "prefect-server.log"
ADDRESS = "PREFECT_API_URL"
_HOST = "127.0.0.1"
_EPHEMERAL = "ephemeral"
_LASTING = "lasting"


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
    """A server without pages and schedules for one run, on a free port; prefect, imported after this, talks to it."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port = probe.getsockname()[1]
    with _started(port, _EPHEMERAL) as server:
        os.environ[ADDRESS] = server.url
        try:
            yield server
        finally:
            del os.environ[ADDRESS]


@contextlib.contextmanager
def lasting_server(port: int) -> Iterator[str]:
    """The address of a server with pages and schedules: the one of PREFECT_API_URL, else a healthy one on this port,
    else one that is started here and ends with this process."""
    if address := os.environ.get(ADDRESS):
        check(address)
        yield address
    elif answers(local_url(port)):
        yield local_url(port)
    else:
        check_port(port, "serve")
        with _started(port, _LASTING) as server:
            server.wait()
            yield server.url


def local_url(port: int) -> str:
    return f"http://{_HOST}:{port}/api"


def answers(url: str) -> bool:
    """Whether a Prefect server is healthy at this address."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as response:
            return bool(response.status == 200 and response.read(5) == b"true")  # noqa: PLR2004
    except (urllib.error.URLError, OSError):
        return False


def check(url: str) -> None:
    """ProjectError if no Prefect server answers; its client would try again for minutes."""
    if not answers(url):
        raise ProjectError(
            f"no Prefect server answers at {ADDRESS}={url}", f"start it, or unset {ADDRESS} to use one of our own"
        )


def check_port(port: int, command: str) -> None:
    """ProjectError if something listens there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError:
            raise ProjectError(f"port {port} is in use", f"nightshift {command} --port {port + 1}") from None


@contextlib.contextmanager
def _started(port: int, kind: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "flows.server", str(port), kind]
    own = {"PREFECT_SERVER_API_HOST": _HOST, "PREFECT_SERVER_API_PORT": str(port)}  # where its pages look for it
    with LOG.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, env=os.environ | own
        )
    with process:  # its end closes the pipe and waits
        try:
            yield Server(process, local_url(port))
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
            process.kill()


def _serve(port: int, *, ephemeral: bool) -> None:
    import uvicorn
    from prefect.server.api.server import create_app

    os.umask(0o077)
    Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    uvicorn.run(create_app(ephemeral=ephemeral), host=_HOST, port=port, log_level="error", lifespan="on")


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), ephemeral=sys.argv[2] == _EPHEMERAL)
