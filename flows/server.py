"""Prefect servers that end with the process that started them.

Prefect would start one by itself, but in our process group: a Ctrl-C then reaches it too, and we would wait for its
answer for minutes. Ours has a session of its own and ends when its standard input does, which is when this process
ends, by whatever signal. Starting it does not import prefect, so the two processes get ready at the same time.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import http.client
import os
import secrets
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

from nightshift import spawning
from nightshift.errors import ProjectError
from nightshift.project import paths
from nightshift.project.environment import CLIENT_PASSWORD, SERVER_PASSWORD, without_password

PATIENCE_SECONDS = 300
"""A server that ended is noticed at once; with some twenty busy processes on two cores a start takes minutes."""
LOG = paths.STATE / "prefect-server.log"
ADDRESS = "PREFECT_API_URL"
_LOG_LINES = 12
_HOST = "127.0.0.1"
_EPHEMERAL = "ephemeral"
_LASTING = "lasting"
_OK, _UNAUTHORIZED = 200, 401
_SECONDS_TO_ANSWER = 10.0
"""For a server that is asked once before a run; on a busy machine two are too short."""
_MAX_RETRIES = "PREFECT_CLIENT_MAX_RETRIES"
_RETRIES = "3"
"""Of requests to a temporary server, 14 s in all. It does not come back when it has ended: Prefect's 5 retries are
62 s, and a run whose server ended makes several requests before it gives up."""


class Server:
    """A server that is starting; `wait` until it answers."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self._process = process
        self.url = url

    def wait(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not answers(self.url):
            if (status := self._process.poll()) is not None:
                raise _not_started(f"ended with status {status} while it started")
            if time.monotonic() > deadline:
                raise _not_started(f"did not answer within {PATIENCE_SECONDS} s")
            time.sleep(0.1)


def _not_started(what: str) -> ProjectError:
    """With the end of the log: who reads the error may not have the folder, as in CI."""
    lines = LOG.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    return ProjectError("\n    ".join([f"Prefect's server {what}. {LOG} ends with:", *lines]), f"cat {LOG}")


@contextlib.contextmanager
def temporary_server() -> Iterator[Server]:
    """A server without pages and schedules for one run, on a free port; prefect, imported after this, talks to it.

    Other users of this machine reach its port, so that it asks for a password that only this process and its children
    know.
    """
    password = f"nightshift:{secrets.token_hex()}"
    with socket.create_server((_HOST, 0)) as listener:
        variables = {SERVER_PASSWORD: password, CLIENT_PASSWORD: password, ADDRESS: local_url(_port(listener))}
        variables[_MAX_RETRIES] = os.environ.get(_MAX_RETRIES, _RETRIES)
        with spawning.variables(variables), _started(listener, _EPHEMERAL) as server:
            yield server


@contextlib.contextmanager
def lasting_server(port: int) -> Iterator[str]:
    """The address of a server with pages and schedules: the one of PREFECT_API_URL, else a healthy one on this port,
    else one that is started here and ends with this process."""
    if address := os.environ.get(ADDRESS):
        check(address)
        yield address
    elif answers(local_url(port), _SECONDS_TO_ANSWER):
        check(local_url(port))
        yield local_url(port)
    else:
        with _listener(port, "serve") as listener, _started(listener, _LASTING) as server:
            server.wait()
            yield server.url


def local_url(port: int) -> str:
    return f"http://{_HOST}:{port}/api"


def answers(url: str, seconds: float = 2.0) -> bool:
    """Whether a Prefect server is healthy at this address, and says so in time."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=seconds) as response:
            return bool(response.status == _OK and response.read(5) == b"true")
    except (OSError, http.client.HTTPException):
        return False


def check(url: str) -> None:
    """ProjectError if no Prefect server answers, or if it refuses our password; its client would try for minutes."""
    shown = without_password(url)
    admitted = _admits(url) if answers(url, _SECONDS_TO_ANSWER) else None
    if admitted is None:
        raise ProjectError(
            f"no Prefect server answers at {ADDRESS}={shown}", f"start it, or unset {ADDRESS} to use one of our own"
        )
    if not admitted:
        what = f"refuses {CLIENT_PASSWORD}" if CLIENT_PASSWORD in os.environ else f"asks for {CLIENT_PASSWORD}"
        raise ProjectError(
            f"the Prefect server at {shown} {what}",
            f"export {CLIENT_PASSWORD}=USER:PASSWORD, as {SERVER_PASSWORD} says where the server runs",
        )


def _admits(url: str) -> bool | None:
    """Whether the server takes our password, or asks for none; being healthy takes none. None if it does not answer."""
    password = base64.b64encode(os.environ.get(CLIENT_PASSWORD, "").encode()).decode()
    request = urllib.request.Request(f"{url}/admin/version", headers={"Authorization": f"Basic {password}"})
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS_TO_ANSWER):
            return True
    except urllib.error.HTTPError as error:
        return error.code != _UNAUTHORIZED
    except (OSError, http.client.HTTPException):
        return None


def check_port(port: int, command: str) -> None:
    """ProjectError if nothing can listen there."""
    _listener(port, command).close()


def _listener(port: int, command: str) -> socket.socket:
    try:
        return socket.create_server((_HOST, port))
    except OSError as error:
        raise _cannot_listen(error, port, command) from None


def _cannot_listen(error: OSError, port: int, command: str) -> ProjectError:
    if error.errno == errno.EADDRINUSE:
        return ProjectError(f"port {port} is in use", f"nightshift {command} --port {port + 1}")
    if error.errno == errno.EACCES:
        return ProjectError(
            f"this user may not listen on port {port}", f"give a higher one: nightshift {command} --port PORT"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return ProjectError(f"{_HOST} is not an address of this machine", "switch its loopback on: ip link set lo up")
    return ProjectError(f"{_HOST}:{port} cannot be listened on: {error}", f"nightshift {command} --port PORT")


def _port(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


@contextlib.contextmanager
def _started(listener: socket.socket, kind: str) -> Iterator[Server]:
    """A server on this socket. It inherits the socket, since a port that is only known to be free may be taken in the
    seconds in which the server imports prefect."""
    port, inherited = _port(listener), listener.fileno()
    command = [sys.executable, "-m", "flows.server", str(inherited), kind]
    own = {"PREFECT_SERVER_API_HOST": _HOST, "PREFECT_SERVER_API_PORT": str(port)}  # where its pages look for it
    with LOG.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | own,
            pass_fds=[inherited],
        )
    listener.close()  # so that nobody waits for an answer when the server has ended
    with process:  # its end closes the pipe and waits
        try:
            yield Server(process, local_url(port))
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
            process.kill()


def _serve(listener: socket.socket, *, ephemeral: bool) -> None:
    import uvicorn
    from prefect.server.api.server import create_app

    os.umask(0o077)
    Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    config = uvicorn.Config(create_app(ephemeral=ephemeral), log_level="error", lifespan="on")
    uvicorn.Server(config).run(sockets=[listener])


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), ephemeral=sys.argv[2] == _EPHEMERAL)
