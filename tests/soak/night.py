"""A project whose nights are disturbed, another one that is left alone, and the processes of a run."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml

from nightshift.config import merged
from nightshift.pipeline.run import TIMINGS
from nightshift.project import paths
from tests.command import Command
from tests.conftest import git, make_project

DISK_MB = 1024
"""Size of the disk that the disturbed project has for itself."""
SMALLEST = {
    "machine": {"free_disk_gb": 0.05, "checkpoint_every": {"sft_steps": 20, "rloo_iterations": 1}},
    "sft": {"steps": 100},
    "rloo": {"iterations": 6},
    "register": {"min_success_rate": 0.0},
}
"""So little training solves 0 to 2 of 20 states: without a bar there is a champion from the first night on."""
WEIGHTS = (paths.SFT_POLICY / "policy.safetensors", paths.RLOO_POLICY / "policy.safetensors")
TRAINING = ("states", "collect", "dataset", "start", "sft", "choose", "rloo")
RUN_SECONDS = 900.0
"""A run that takes longer hangs."""
HANGS = 124
"""In place of its exit code, as of timeout(1)."""
_MOUNT = ("mount", "-t", "tmpfs", "-o")


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    output: str
    errors: str

    @property
    def sentence(self) -> str:
        """The last line for people that is not a next step."""
        lines = [line for line in self.errors.splitlines() if line.startswith(("error:", "stopped"))]
        return lines[-1] if lines else ""


class Interpreter:
    """A command in a new interpreter, for what has to be there when a process starts; otherwise as `Command`."""

    def __init__(self, root: Path, *arguments: str, **environment: str) -> None:
        self._output = Path(tempfile.mkdtemp(prefix="command-"))
        with (self._output / "stdout").open("w") as out, (self._output / "stderr").open("w") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "nightshift", *arguments],
                cwd=root,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.arguments = arguments
        self.pid = self._process.pid

    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float = RUN_SECONDS) -> subprocess.CompletedProcess[str]:
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        stdout, stderr = ((self._output / name).read_text() for name in ("stdout", "stderr"))
        shutil.rmtree(self._output)
        return subprocess.CompletedProcess(self.arguments, code, stdout, stderr)


def how_it_ended(command: Command | Interpreter) -> Ended:
    try:
        done = command.wait(RUN_SECONDS)
    except subprocess.TimeoutExpired:
        return Ended(HANGS, "", f"error: it hung, and was killed after {RUN_SECONDS:g} s")
    return Ended(done.returncode, done.stdout, done.stderr)


@dataclass
class Night:
    """One cycle: where it happens, and the run that is being disturbed."""

    root: Path
    random: random.Random
    environment: Mapping[str, str] = field(default_factory=dict)
    stage: str = ""
    """The stage that the fault waits for."""
    command: Command | Interpreter | None = None
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """What a fault has to put right before the next run; people would do it, told by the error."""

    @property
    def pid(self) -> int:
        assert self.command is not None
        return self.command.pid

    def start(self, *arguments: str) -> None:
        kind = Interpreter if "LD_PRELOAD" in self.environment else Command
        self.command = kind(self.root, *arguments, **self.environment)

    def wait(self) -> Ended:
        assert self.command is not None
        return how_it_ended(self.command)

    def wait_for_stage(self) -> bool:
        """Until the stage works, and a random part of the time that it last took; False if the run ended before."""
        assert self.command is not None
        folder = self.root / paths.STATE / self.stage
        before = set(folder.glob("*"))
        while not set(folder.glob("*")) - before:
            if not self.command.is_running():
                return False
            time.sleep(0.005)
        time.sleep(self.random.uniform(0.0, _seconds(self.root, self.stage)))
        return self.command.is_running()

    def processes(self, name: str) -> list[psutil.Process]:
        """Processes of the run whose command line has this name, oldest first."""
        found = []
        for process in psutil.Process(self.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if name in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


def _seconds(root: Path, stage: str) -> float:
    try:
        return float(json.loads((root / TIMINGS).read_text())[stage])
    except (OSError, ValueError, KeyError):
        return 0.5


@functools.cache
def can_mount() -> bool:
    """Whether this user may mount a disk; root in a container usually may not."""
    if os.geteuid() != 0 or not shutil.which("mount"):
        return False
    with tempfile.TemporaryDirectory() as folder:
        mounted = subprocess.run([*_MOUNT, "size=1m", "soak", folder], capture_output=True, check=False)
        if mounted.returncode == 0:
            subprocess.run(["umount", "--lazy", folder], check=True)
    return mounted.returncode == 0


@contextlib.contextmanager
def own_disk(folder: Path) -> Iterator[None]:
    """A small disk of its own for the folder, where this user may mount one; else the disk that it is on."""
    folder.mkdir(parents=True)
    if not can_mount():
        yield
        return
    subprocess.run([*_MOUNT, f"size={DISK_MB}m", "soak", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def resize_disk(folder: Path, kilobytes: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={kilobytes}k", str(folder)], check=True)


def small_project(root: Path) -> Path:
    make_project(root)
    params = yaml.safe_load((root / paths.PARAMS).read_text())
    (root / paths.PARAMS).write_text(yaml.safe_dump(merged(params, SMALLEST)))
    git(root, "config", "user.name", "soak")
    git(root, "config", "user.email", "soak@localhost")
    git(root, "commit", "-qam", "small numbers")
    return root


def set_params(root: Path, *, seed: int, workers: int) -> None:
    """What this night computes: another seed makes every stage stale."""
    params = yaml.safe_load((root / paths.PARAMS).read_text())
    params["seed"] = seed
    params["machine"]["workers"] = workers
    (root / paths.PARAMS).write_text(yaml.safe_dump(params))


def weights(root: Path) -> dict[str, bytes]:
    return {path.as_posix(): (root / path).read_bytes() for path in WEIGHTS}


def undisturbed(root: Path, seed: int) -> dict[str, bytes]:
    """The weights of this seed, trained in one process that nothing disturbs, without Ray, Prefect and DVC."""
    set_params(root, seed=seed, workers=0)
    ended = how_it_ended(Command(root, "stage", *TRAINING))
    if ended.code:
        raise RuntimeError(f"the undisturbed run failed: {ended.errors}")
    return weights(root)
