"""`nightshift …` and `dvc …`, each in a process of its own.

A new interpreter takes seconds to import torch, scipy and mlflow, and the tests start dozens of commands, so they are
forked. What only a new interpreter shows (the installed script, PYTHONPATH, which packages a command imports) is
tested with one.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

from nightshift.errors import DataError
from tests.forks import fork, read_prefect_variables
from tests.waiting import SECONDS


class Command:
    """A command that runs in a project, with the variables of this process and the given ones."""

    def __init__(self, root: Path, *arguments: str, program: str = "nightshift", **environment: str) -> None:
        self.arguments = arguments
        self._output = Path(tempfile.mkdtemp(prefix="command-"))
        self._process = fork(_run, root, self._output, (program, *arguments), {**os.environ, **environment})

    @property
    def pid(self) -> int:
        """Of the process and of its group."""
        assert self._process.pid is not None
        return self._process.pid

    def is_running(self) -> bool:
        return self._process.is_alive()

    def printed(self) -> str:
        """So far, on stdout."""
        return self._written("stdout")

    def complained(self) -> str:
        """So far, on stderr."""
        return self._written("stderr")

    def _written(self, stream: str) -> str:
        path = self._output / stream
        return path.read_text() if path.exists() else ""

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float = 1800.0) -> subprocess.CompletedProcess[str]:
        self._process.join(timeout)
        if self._process.exitcode is None:
            self.kill()
            raise subprocess.TimeoutExpired(self.arguments, timeout)
        stdout, stderr = ((self._output / name).read_text() for name in ("stdout", "stderr"))
        shutil.rmtree(self._output)
        return subprocess.CompletedProcess(self.arguments, self._process.exitcode, stdout, stderr)


def dvc(root: Path, *arguments: str) -> str:
    """What a command of DVC prints."""
    done = Command(root, *arguments, program="dvc").wait()
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _run(root: Path, output: Path, command: Sequence[str], environment: Mapping[str, str]) -> None:
    os.setsid()
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(output / name, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(root)
    sys.argv = list(command)
    sys.meta_path.insert(0, _PrefectVariables())
    _MAINS[command[0]]()


class _PrefectVariables(MetaPathFinder):
    """Has Prefect read its variables where a command would import it, which is after it has set them."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "flows.local":
            read_prefect_variables()


def _nightshift() -> None:
    from nightshift.cli.app import main

    main()


def _dvc() -> None:
    from dvc.cli import main

    sys.exit(main(sys.argv[1:]))


def _failing() -> None:
    """nightshift, where the stage sft ends with an error."""
    from nightshift.stages import sft

    def run(*_: object, **__: object) -> None:
        raise DataError("the dataset is damaged", "rm -r data/dataset")

    vars(sft)["run"] = run
    _nightshift()


def _signalled() -> None:
    """nightshift, where SIGTERM lands in the task that asks Prefect for runs to start, and again while that ends."""
    import asyncio

    from prefect.client.orchestration import PrefectClient

    async def ask(*_: object, **__: object) -> list[object]:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.sleep(SECONDS)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
        return []

    setattr(PrefectClient, "get_scheduled_flow_runs_for_deployments", ask)  # noqa: B010
    _nightshift()


def _killed() -> None:
    """nightshift, which is killed as soon as it has written a checkpoint."""
    from nightshift.learners import checkpoint

    save = checkpoint.save

    def save_and_die(*arguments: Any, **named: Any) -> None:
        save(*arguments, **named)
        os.kill(os.getpid(), signal.SIGKILL)

    vars(checkpoint)["save"] = save_and_die
    _nightshift()


FAILING = "failing"
KILLED = "killed"
SIGNALLED = "signalled"
_MAINS = {"nightshift": _nightshift, "dvc": _dvc, FAILING: _failing, KILLED: _killed, SIGNALLED: _signalled}
