"""What may happen to a night: a table of faults, each with what it does and what it must end with."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from nightshift.pipeline.run import TIMINGS, USAGE
from nightshift.project import paths
from tests.conftest import git
from tests.soak.night import DISK_MB, Night, can_mount, resize_disk

Kind = Literal["process", "disk", "link", "file", "clock", "none"]

LONG_STAGES = ("collect", "sft", "rloo", "evaluate", "register")
ON_RAY = ("collect", "rloo", "evaluate")
NOBODY_LISTENS = "http://127.0.0.1:9"
CLOCK = Path(tempfile.mkdtemp(prefix="nightshift-soak-")) / "clock"
"""By how many seconds the time of day is wrong; while there is no file, it is right."""
CLOCK_LIBRARY = CLOCK.with_suffix(".so")
"""It answers processes that ask for the time of day. libfaketime would do so too, but with clocks that only go forward
left alone, its clock_nanosleep fails, and with it every time.sleep() (0.9.10, Python 3.11)."""
atexit.register(shutil.rmtree, CLOCK.parent, ignore_errors=True)
DAY = 86_400


class Missed(Exception):
    """What the fault is about was not there at that moment."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    name: str
    kind: Kind
    strike: Callable[[Night], None]
    stages: tuple[str, ...] = ()
    """It strikes while one of these works; if there are none, before the run begins."""
    workers: int = 0
    refused: bool = False
    """The run must end with an error for people, and not succeed."""
    silent: bool = False
    """The run cannot say anything: it is dead."""
    environment: Mapping[str, str] = field(default_factory=dict)
    possible: Callable[[], bool] = lambda: True


def nothing(_: Night) -> None:
    """A night that is not disturbed."""


# processes


def send(number: signal.Signals) -> Callable[[Night], None]:
    """Send a signal to the process that was started; the processes below it find out by themselves."""
    return lambda night: night.signal(number)


def kill(name: str, *, patience: float = 60.0) -> Callable[[Night], None]:
    """SIGKILL to one of the processes of the run whose command line has this name, as soon as there is one."""

    def strike(night: Night) -> None:
        found = _wait_for_processes(night, name, patience)
        with contextlib.suppress(psutil.NoSuchProcess):
            night.random.choice(found).kill()

    return strike


def _wait_for_processes(night: Night, name: str, seconds: float) -> list[psutil.Process]:
    """A stage starts some of its processes late: the raylet lives for the last third of a short `collect`."""
    deadline = time.monotonic() + seconds
    while night.command is not None and night.command.is_running() and time.monotonic() < deadline:
        with contextlib.suppress(psutil.NoSuchProcess):
            if found := night.processes(name):
                return found
        time.sleep(0.01)
    raise Missed(f"no process {name}")


def cut_power(night: Night) -> None:
    """All processes of the run at once."""
    for process in [*psutil.Process(night.pid).children(recursive=True), psutil.Process(night.pid)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def kill_in_mlflow_write(night: Night) -> None:
    """SIGKILL while MLflow's database has an open transaction."""
    journal = night.root / f"{paths.MLFLOW_DATABASE}-journal"
    deadline = time.monotonic() + 20
    while not journal.exists():
        if time.monotonic() > deadline or night.command is None or not night.command.is_running():
            raise Missed("nothing was written to MLflow")
    night.signal(signal.SIGKILL)


# the disk


def fill_disk(night: Night) -> None:
    """Next to no room is left, until the run has ended."""
    disk = night.root.parent
    used = shutil.disk_usage(disk).used // 1024
    night.undo.callback(resize_disk, disk, DISK_MB * 1024)
    resize_disk(disk, used + night.random.choice([4, 64, 512]))


# links


def freeze_prefect(night: Night) -> None:
    """The Prefect server takes requests and does not answer for a while."""
    servers = night.processes("flows.server")
    if not servers:
        raise Missed("no Prefect server")
    seconds = night.random.uniform(5, 30)
    for server in servers:
        server.suspend()
    timer = threading.Timer(seconds, _resume, [servers])
    timer.start()
    night.undo.callback(_resume, servers)
    night.undo.callback(timer.cancel)


def _resume(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def lock_mlflow(night: Night) -> None:
    """Another process writes to MLflow's database for a while."""
    connection = sqlite3.connect(night.root / paths.MLFLOW_DATABASE, timeout=20, check_same_thread=False)
    try:
        connection.execute("BEGIN EXCLUSIVE")
    except sqlite3.OperationalError as error:
        connection.close()
        raise Missed(str(error)) from error
    timer = threading.Timer(night.random.uniform(2, 15), connection.close)
    timer.start()
    night.undo.callback(timer.join)


# files


def truncate_lock(night: Night) -> None:
    """dvc.lock ends somewhere in the middle."""
    lock = _recorded(night)
    content = lock.read_bytes()
    night.undo.callback(git, night.root, "checkout", "--", str(paths.DVC_LOCK))
    lock.write_bytes(content[: night.random.randrange(1, len(content))])


def conflict_in_lock(night: Night) -> None:
    lock = _recorded(night)
    lines = lock.read_text().splitlines(keepends=True)
    place = night.random.randrange(1, len(lines))
    night.undo.callback(git, night.root, "checkout", "--", str(paths.DVC_LOCK))
    lines[place:place] = ["<<<<<<< HEAD\n", lines[place - 1], "=======\n", lines[place - 1], ">>>>>>> other\n"]
    lock.write_text("".join(lines))


def _recorded(night: Night) -> Path:
    lock = night.root / paths.DVC_LOCK
    if not lock.exists():
        raise Missed("there is no dvc.lock yet")
    return lock


def key_twice(night: Night) -> None:
    """params.yaml states the seed twice."""
    path = night.root / paths.PARAMS
    content = path.read_text()
    night.undo.callback(path.write_text, content)
    path.write_text(content + "seed: 1\n")


def flip_checkpoint(night: Night) -> None:
    """The run is killed, and then a bit of its newest checkpoint is found to be another one."""
    deadline = time.monotonic() + 30
    while not (found := list(night.root.glob(f"{paths.STATE}/{night.stage}/*/step-*/manifest.json"))):
        if time.monotonic() > deadline or night.command is None or not night.command.is_running():
            raise Missed("no checkpoint was written")
        time.sleep(0.005)
    night.signal(signal.SIGKILL)
    _wait_for_end(night)
    found = list(night.root.glob(f"{paths.STATE}/{night.stage}/*/step-*/manifest.json"))
    if not found:  # it was done at that moment: a run that was killed is left
        return
    newest = max(found, key=lambda path: path.parent.name).parent
    flip_bit(night.random.choice(sorted(newest.iterdir())), night)


def _wait_for_end(night: Night) -> None:
    while night.command is not None and night.command.is_running():
        time.sleep(0.01)


def flip_output(night: Night) -> None:
    """A bit of a stage's output is another one after the stage was done."""
    folders = [folder for folder in (paths.DATASET, paths.SFT_POLICY, paths.DEMOS) if (night.root / folder).is_dir()]
    files = sorted(path for folder in folders for path in (night.root / folder).rglob("*") if path.is_file())
    if not files:
        raise Missed("no stage was done")
    flip_bit(night.random.choice(files), night)


def flip_bit(path: Path, night: Night) -> None:
    content = bytearray(path.read_bytes())
    if not content:
        raise Missed(f"{path.name} is empty")
    content[night.random.randrange(len(content))] ^= 1 << night.random.randrange(8)
    path.chmod(0o644)
    path.write_bytes(content)


def truncate_records(night: Night) -> None:
    """Files that only tell how the last run went."""
    for path in (TIMINGS, USAGE, paths.RUN_RECORD):
        if (night.root / path).exists():
            (night.root / path).write_bytes((night.root / path).read_bytes()[:7])


def leave_git_lock(night: Night) -> None:
    """What a killed `git commit` leaves."""
    lock = night.root / ".git" / "index.lock"
    lock.touch()
    night.undo.callback(lock.unlink, missing_ok=True)


# clocks


def shift_times(night: Night) -> None:
    """Every file seems to be of another year, past or future, as after the clock was wrong."""
    now = time.time() + night.random.choice([-400, 400]) * DAY
    for folder, _, names in os.walk(night.root):
        for name in names:
            with contextlib.suppress(OSError):
                os.utime(Path(folder) / name, (now, now), follow_symlinks=False)


def jump_clock(night: Night) -> None:
    """The time of day of all processes of the run is another one from now on."""
    night.undo.callback(CLOCK.unlink)
    CLOCK.write_text(f"{night.random.choice([3 * DAY, -3 * DAY, 3600, -3600])}\n")


@functools.cache
def can_jump() -> bool:
    """Whether the library of clocks that jump is there: it is compiled now, and its folder removed at the end."""
    compiler = shutil.which("cc")
    if compiler is None:
        return False
    source = Path(__file__).with_name("clock.c")
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(CLOCK_LIBRARY), str(source)]
    return subprocess.run(command, check=False).returncode == 0


WRONG_CLOCK = {"LD_PRELOAD": str(CLOCK_LIBRARY), "SOAK_CLOCK": str(CLOCK)}


FAULTS: tuple[Fault, ...] = (
    Fault(name="nothing", kind="none", strike=nothing, workers=1),
    Fault(name="sigkill driver", kind="process", strike=send(signal.SIGKILL), stages=LONG_STAGES, silent=True),
    Fault(
        name="sigkill driver on Ray",
        kind="process",
        strike=send(signal.SIGKILL),
        stages=ON_RAY,
        workers=1,
        silent=True,
    ),
    Fault(
        name="sigkill in an MLflow write", kind="process", strike=kill_in_mlflow_write, stages=LONG_STAGES, silent=True
    ),
    Fault(name="power cut", kind="process", strike=cut_power, stages=LONG_STAGES, workers=1, silent=True),
    Fault(name="sigterm driver", kind="process", strike=send(signal.SIGTERM), stages=LONG_STAGES),
    Fault(name="sighup driver", kind="process", strike=send(signal.SIGHUP), stages=LONG_STAGES),
    Fault(name="sigint driver on Ray", kind="process", strike=send(signal.SIGINT), stages=ON_RAY, workers=1),
    Fault(name="sigkill worker", kind="process", strike=kill("ray::Worker"), stages=ON_RAY, workers=1),
    Fault(name="sigkill raylet", kind="process", strike=kill("raylet/raylet"), stages=ON_RAY, workers=1),
    Fault(name="sigkill GCS", kind="process", strike=kill("gcs_server"), stages=ON_RAY, workers=1),
    Fault(name="sigkill Prefect server", kind="process", strike=kill("flows.server"), stages=LONG_STAGES),
    Fault(name="full disk", kind="disk", strike=fill_disk, stages=LONG_STAGES, possible=can_mount),
    Fault(name="Prefect server hangs", kind="link", strike=freeze_prefect, stages=LONG_STAGES),
    Fault(
        name="Prefect unreachable",
        kind="link",
        strike=nothing,
        environment={"PREFECT_API_URL": f"{NOBODY_LISTENS}/api"},
        refused=True,
    ),
    Fault(
        name="MLflow unreachable",
        kind="link",
        strike=nothing,
        environment={"MLFLOW_TRACKING_URI": NOBODY_LISTENS},
        refused=True,
    ),
    Fault(name="MLflow database locked", kind="link", strike=lock_mlflow, stages=LONG_STAGES),
    Fault(name="dvc.lock truncated", kind="file", strike=truncate_lock),
    Fault(name="dvc.lock with a conflict", kind="file", strike=conflict_in_lock, refused=True),
    Fault(name="params.yaml with a key twice", kind="file", strike=key_twice, refused=True),
    Fault(name="checkpoint damaged", kind="file", strike=flip_checkpoint, stages=("sft", "rloo"), silent=True),
    Fault(name="output damaged", kind="file", strike=flip_output, stages=("sft", "rloo", "evaluate")),
    Fault(name="records truncated", kind="file", strike=truncate_records),
    Fault(name="git lock left over", kind="file", strike=leave_git_lock),
    Fault(name="file times shifted", kind="clock", strike=shift_times),
    Fault(
        name="clock jumps",
        kind="clock",
        strike=jump_clock,
        stages=LONG_STAGES,
        environment=WRONG_CLOCK,
        possible=can_jump,
    ),
)
