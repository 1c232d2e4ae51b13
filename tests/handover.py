"""Ray workers that are forked from a process that has imported torch already.

In a new interpreter a worker or a learner's rank needs three to five seconds of CPU before it does anything, and the
tests start dozens. What only a new interpreter shows (its priority, its PYTHONPATH) is tested with one.

Ray starts this file as its worker program. It passes on what it was started with, and ends: Ray knows a worker by the
socket that it opens and by the process number that it sends, so it may be any process. Nothing here imports Ray, which
reads some of its variables (the job, the process number of the raylet) when it is imported: each worker does that.
"""

import contextlib
import os
import pickle
import runpy
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ADDRESS_VARIABLE = "NIGHTSHIFT_TEST_RAY_WORKERS"
_STREAMS = (0, 1, 2)


@contextlib.contextmanager
def forked_workers() -> Iterator[dict[str, Any]]:
    """Settings of Ray nodes whose workers are forked."""
    from ray._private.workers import default_worker

    from tests.forks import fork

    with tempfile.TemporaryDirectory(prefix="ray-workers-") as folder, socket.socket(socket.AF_UNIX) as listener:
        address = str(Path(folder) / "socket")
        listener.bind(address)
        listener.listen()
        server = fork(_serve, listener, default_worker.__file__)
        yield {"worker_path": __file__, "env_vars": {_ADDRESS_VARIABLE: address}}
        server.kill()
        server.join()


def _serve(listener: socket.socket, program: str) -> None:
    """Fork for every connection; the new process goes on as `program`."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers are not waited for
    while True:
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            _run(connection, program)
        connection.close()


def _run(connection: socket.socket, program: str) -> None:
    """With the arguments, variables, folder and streams that Ray has chosen."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, streams, _, _ = socket.recv_fds(connection, 1, len(_STREAMS))
    for stream, number in zip(streams, _STREAMS, strict=True):
        os.dup2(stream, number)
        os.close(stream)
    with connection, connection.makefile("rb") as sent:
        arguments, environment, folder = pickle.load(sent)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")


def _ask_for_worker() -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ[_ADDRESS_VARIABLE])
        socket.send_fds(server, [b" "], _STREAMS)
        server.sendall(pickle.dumps((sys.argv[1:], dict(os.environ), os.getcwd())))


if __name__ == "__main__":
    _ask_for_worker()
