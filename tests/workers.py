"""The processes of `pytest -n`, forked from one that has imported the heavy packages, and of each of them the process
that forks.py forks commands from. In a new interpreter each takes ten seconds of CPU time for that.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from tests import forks, handover

if TYPE_CHECKING:
    from execnet import XSpec

_IMPORTED = ("av", "gymnasium", "h5py", "hypothesis.stateful", "pandas", "pyarrow.parquet")
"""By the tests. Nothing that reads variables when it is imported, as Ray does: a test or a command sets them."""


class Workers:
    """Forks a process for every worker that is started as the specifications then say."""

    def __init__(self, specs: Sequence[XSpec]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="workers-")
        address = f"{self._folder.name}/socket"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            number = listener.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from tests.workers import serve; serve({number})"],
                cwd=Path(__file__).parent.parent,
                pass_fds=[number],
                stdin=subprocess.PIPE,  # its end is that of this process, however it ends
            )
        for spec in specs:
            variable = f"{handover.ADDRESS_VARIABLE}={address}"
            spec.python = shlex.join(["env", variable, sys.executable, "-S", handover.__file__])

    def close(self) -> None:
        with self._process:
            self._process.kill()
        self._folder.cleanup()


def serve(listener: int) -> None:
    """Fork a worker for every connection, until the standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the workers
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # they are not waited for
    accepting = socket.socket(fileno=listener)
    address = accepting.getsockname()
    with mock.patch.dict(os.environ, forks.SETTINGS):
        for name in forks.PRELOADED:
            if not name.startswith("tests."):  # pytest imports these in its own way
                importlib.import_module(name)
    forks.read_prefect_variables()
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # a garbage collection in a fork would copy all of this
    while sys.stdin not in select.select([accepting, sys.stdin], [], [])[0]:
        connection, _ = accepting.accept()
        if not os.fork():
            accepting.close()
            forks.serve(f"{address}-{os.getpid()}")
            _work(connection)
            return
        connection.close()


def _work(connection: socket.socket) -> None:
    """Run the program that execnet would have started an interpreter with."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    program = handover.take_over(connection)[-1]
    exec(program, {"__name__": "__main__"})
