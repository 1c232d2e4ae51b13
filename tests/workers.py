"""The processes of `pytest -n`, forked from the one that has imported the heavy packages (forks.py): in a new
interpreter each takes fifteen seconds of CPU time to import them and the tests."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import shlex
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING

from tests import forks, handover

if TYPE_CHECKING:
    from execnet import XSpec


@contextlib.contextmanager
def forked(specs: Sequence[XSpec]) -> Iterator[None]:
    """Within the block, processes that are started as the specifications then say are forked."""
    shared = forks.share()
    with tempfile.TemporaryDirectory(prefix="workers-") as folder, socket.socket(socket.AF_UNIX) as listener:
        address = str(Path(folder) / "socket")
        listener.bind(address)
        listener.listen()
        server = forks.fork(_serve, listener, shared)
        for spec in specs:
            variable = f"{handover.ADDRESS_VARIABLE}={address}"
            spec.python = shlex.join(["env", variable, sys.executable, "-S", handover.__file__])
        yield
        server.kill()
        server.join()


def _serve(listener: socket.socket, shared: str) -> None:
    """Fork a worker for every connection, until the process that asked for this one ends."""
    parent = multiprocessing.parent_process()
    assert parent
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers are not waited for
    while parent.sentinel not in connection.wait([listener, parent.sentinel]):
        accepted, _ = listener.accept()
        if not os.fork():
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _work(accepted, shared)
            return
        accepted.close()


def _work(accepted: socket.socket, shared: str) -> None:
    """Run the program that execnet would have started an interpreter with."""
    program = handover.take_over(accepted)[-1]
    del os.environ[handover.ADDRESS_VARIABLE]
    multiprocessing.set_start_method(None, force=True)  # as in a new interpreter
    forks.join(shared)
    with open(0, closefd=False) as sys.stdin:  # multiprocessing has put an empty file in its place
        exec(program, {"__name__": "__main__"})
    atexit._run_exitfuncs()  # which multiprocessing leaves out
