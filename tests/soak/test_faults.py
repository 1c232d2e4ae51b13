"""Each fault of the soak does what its name says, and what it has to put right is put right."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nightshift import config
from nightshift.errors import ConfigError
from nightshift.pipeline.run import TIMINGS
from nightshift.project import graph, paths
from tests.conftest import git, make_project
from tests.soak import faults
from tests.soak.faults import FAULTS, Missed
from tests.soak.night import DISK_MB, Interpreter, Night, can_mount, own_disk
from tests.soak.soak import in_random_order
from tests.waiting import wait_until

LOCK = "schema: '2.0'\nstages:\n  states:\n    cmd: a\n  collect:\n    cmd: b\n"


@pytest.fixture
def night(tmp_path: Path) -> Night:
    root = make_project(tmp_path / "project")
    (root / paths.DVC_LOCK).write_text(LOCK)
    git(root, "add", "-f", str(paths.DVC_LOCK))
    git(root, "commit", "-qm", "a night")
    return Night(root, random.Random(0))


class Sleeper(Interpreter):
    """A process in place of a run, with one below it."""

    def __init__(self, root: Path, program: str) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", program], cwd=root)
        self.pid = self._process.pid


def sleeping(night: Night) -> Sleeper:
    child = "import sys, time; time.sleep(600)"
    sleeper = Sleeper(
        night.root, f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}, 'flows.server'])"
    )
    night.command = sleeper
    wait_until(lambda: night.processes("flows.server"))
    return sleeper


def test_names_are_unique_and_every_kind_of_fault_is_there() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert {fault.kind for fault in FAULTS} == {"none", "process", "disk", "link", "file", "clock"}
    stages = set(graph.load(Path(__file__).parents[2]))
    assert all(set(fault.stages) <= stages for fault in FAULTS)


def test_all_faults_come_before_one_comes_again_in_an_order_that_the_seed_decides() -> None:
    def drawn(seed: int) -> list[str]:
        order = in_random_order(list(FAULTS), random.Random(seed))
        return [next(order).name for _ in FAULTS]

    assert set(drawn(0)) == {fault.name for fault in FAULTS}
    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)


def test_a_process_below_the_run_is_killed_by_name_and_an_absent_one_is_a_miss(night: Night) -> None:
    sleeper = sleeping(night)
    with pytest.raises(Missed, match="no process raylet"):
        faults.kill("raylet", patience=0.1)(night)
    (server,) = night.processes("flows.server")
    faults.kill("flows.server")(night)
    server.wait(30)
    sleeper._process.wait(30)  # which waited for it


def test_a_power_cut_ends_all_processes_of_the_run(night: Night) -> None:
    sleeper = sleeping(night)
    (server,) = night.processes("flows.server")
    faults.cut_power(night)
    sleeper._process.wait(30)
    server.wait(30)


def test_a_frozen_server_goes_on_at_the_latest_when_the_run_has_ended(night: Night) -> None:
    sleeper = sleeping(night)
    (server,) = night.processes("flows.server")
    with night.undo:
        faults.freeze_prefect(night)
        wait_until(lambda: server.status() == "stopped")
    wait_until(lambda: server.status() != "stopped")
    faults.cut_power(night)
    sleeper._process.wait(30)


@pytest.mark.slow
def test_a_locked_database_is_locked_for_a_while(night: Night) -> None:
    database = night.root / paths.MLFLOW_DATABASE
    database.parent.mkdir(parents=True)
    with night.undo:
        faults.lock_mlflow(night)
        with pytest.raises(sqlite3.OperationalError, match="locked"), sqlite3.connect(database, timeout=0) as other:
            other.execute("CREATE TABLE a (b)")
    with sqlite3.connect(database, timeout=0) as other:
        other.execute("CREATE TABLE a (b)")


def test_a_lock_with_a_conflict_and_a_key_that_is_there_twice_are_refused_until_they_are_put_right(
    night: Night,
) -> None:
    for strike, path in ((faults.conflict_in_lock, paths.DVC_LOCK), (faults.key_twice, paths.PARAMS)):
        before = (night.root / path).read_text()
        with night.undo:
            strike(night)
            with pytest.raises(ConfigError):
                config.read_yaml(night.root / path)
        assert (night.root / path).read_text() == before


def test_a_truncated_lock_is_shorter_and_is_put_right(night: Night) -> None:
    with night.undo:
        faults.truncate_lock(night)
        assert LOCK.startswith((night.root / paths.DVC_LOCK).read_text())
        assert (night.root / paths.DVC_LOCK).read_text() != LOCK
    assert (night.root / paths.DVC_LOCK).read_text() == LOCK


def test_one_bit_of_an_output_is_another_one(night: Night) -> None:
    with pytest.raises(Missed):
        faults.flip_output(night)
    output = night.root / paths.SFT_POLICY / "policy.safetensors"
    output.parent.mkdir(parents=True)
    output.write_bytes(bytes(100))
    faults.flip_output(night)
    assert sum(byte.bit_count() for byte in output.read_bytes()) == 1


def test_records_are_no_json_any_more(night: Night) -> None:
    (night.root / TIMINGS).parent.mkdir()
    (night.root / TIMINGS).write_text('{"states": 1.0}')
    faults.truncate_records(night)
    assert (night.root / TIMINGS).read_text() == '{"state'


def test_every_file_is_of_another_year(night: Night) -> None:
    faults.shift_times(night)
    assert abs((night.root / paths.PARAMS).stat().st_mtime - time.time()) > 300 * faults.DAY


@pytest.mark.skipif(not can_mount(), reason="this user may not mount a disk")
def test_a_full_disk_takes_no_more_and_has_room_again_afterwards(tmp_path: Path) -> None:
    with own_disk(tmp_path / "disk"):
        night = Night(tmp_path / "disk" / "project", random.Random(0))
        night.root.mkdir()
        with night.undo:
            faults.fill_disk(night)
            with pytest.raises(OSError, match="No space left"):
                (night.root / "file").write_bytes(bytes(2**21))
        (night.root / "file").write_bytes(bytes(2**21))
        assert shutil.disk_usage(night.root).total == DISK_MB * 2**20


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_the_clock_of_a_process_jumps_and_is_right_again_and_it_sleeps_as_before(night: Night) -> None:
    assert faults.can_jump()
    program = (
        "import subprocess, time; from datetime import datetime; began = time.monotonic(); time.sleep(0.01);"
        "print(time.time(), datetime.now().timestamp(), time.monotonic() - began,"
        "      subprocess.run(['date', '+%s'], capture_output=True, text=True).stdout)"
    )

    def off_by() -> list[float]:
        environment = {**os.environ, **faults.WRONG_CLOCK}
        told = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        *clocks, slept, child = map(float, told.stdout.split())
        assert 0.01 <= slept < 300
        return [abs(clock - time.time()) for clock in (*clocks, child)]

    assert max(off_by()) < 300
    with night.undo:
        faults.jump_clock(night)
        assert min(off_by()) > 3000
    assert max(off_by()) < 300
