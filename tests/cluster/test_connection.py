"""A small Ray cluster on this machine is for this user and this machine alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nightshift.cluster import connection
from nightshift.errors import RolloutError
from tests.conftest import REPOSITORY

PROGRAM = """
import contextlib, json, os, psutil, ray
from nightshift.cluster.connection import start_ray, stop_ray

start_ray(1)
own = psutil.Process()
listening = set()
for process in [own, *own.children(recursive=True)]:
    with contextlib.suppress(psutil.NoSuchProcess):
        open_ones = [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        listening |= {connection.laddr.ip for connection in open_ones}
folder = os.path.dirname(os.path.dirname(ray._private.worker._global_node.get_session_dir_path()))
mode = os.stat(folder).st_mode & 0o777
print(json.dumps({"listening": sorted(listening), "folder": folder, "mode": mode}), flush=True)
{end}
"""


@pytest.mark.parametrize(
    "end", ["raise SystemExit(0)", pytest.param("stop_ray(); os._exit(0)", marks=pytest.mark.slow)]
)
def test_ray_listens_on_loopback_and_its_folder_is_private_and_removed(tmp_path: Path, end: str) -> None:
    dead = Path(f"/tmp/nightshift-ray-{2**22 + 1}-left")  # above the largest process id
    dead.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}"}
    command = [sys.executable, "-c", PROGRAM.replace("{end}", end)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["listening"]
    assert {address.removeprefix("::ffff:") for address in found["listening"]} == {"127.0.0.1"}
    assert found["mode"] == 0o700
    assert not Path(found["folder"]).exists()
    assert not dead.exists(), "what a killed process left is removed"


LEARNERS_FIRST = """
import ray
from nightshift.learners.opening import open_learners
from tests.learners.test_ranks import machine, spec

open_learners(spec(), machine(ranks=2, workers=3))
print(ray.cluster_resources()["CPU"])
ray.shutdown()
"""


@pytest.mark.slow
def test_learners_that_start_ray_leave_room_for_the_simulators_of_later_stages(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}"}
    command = [sys.executable, "-c", LEARNERS_FIRST]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "3.0"


def test_a_ray_that_does_not_start_is_a_sentence_and_worth_another_try(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: object, **__: object) -> None:
        raise Exception("The current node timed out during startup.")  # as Ray does

    monkeypatch.setattr("ray.init", late)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(RolloutError, match="Ray did not start on this machine: The current node timed out"):
        connection.start_ray(1)


SERVER_KILLED = """
import psutil, time
from nightshift.cluster.connection import start_ray

start_ray(1)
while not (found := [p for p in psutil.Process().children(recursive=True) if p.name() == "{name}"]):
    time.sleep(0.1)
time.sleep(2)
found[0].kill()
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gcs_server", "raylet", "ray::DashboardAgent", "ray::RuntimeEnvAgent"])
def test_a_killed_server_of_a_small_cluster_ends_its_process_with_a_sentence(tmp_path: Path, name: str) -> None:
    """Ray ends it too, after up to a minute and without one."""
    done = in_its_own_group(SERVER_KILLED.format(name=name), tmp_path)
    assert done.returncode == 1
    assert "error: a server of Ray on this machine was killed\n  → run again: it resumes" in done.stderr


KILLED_WHILE_RAY_CONNECTS = """
import psutil, threading, time
from ray._private import worker
from nightshift.cluster.connection import start_ray

def kill():
    while worker._global_node is None:
        time.sleep(0.001)
    [raylet] = [p for p in psutil.Process().children(recursive=True) if p.name() == "raylet"]
    raylet.kill()

threading.Thread(target=kill, daemon=True).start()
start_ray(1)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_server_that_is_killed_while_ray_connects_ends_its_process_with_a_sentence_too(tmp_path: Path) -> None:
    done = in_its_own_group(KILLED_WHILE_RAY_CONNECTS, tmp_path)
    assert done.returncode == 1
    assert [line.startswith("error: ") for line in done.stderr.splitlines()].count(True) == 1
    assert "was killed\n  → run again: it resumes" in done.stderr


STARTS = """
import os, ray
from nightshift.cluster.connection import _start

ray.init = lambda *_, **__: {end}
_start(1)
"""


@pytest.mark.parametrize(("end", "told"), [("os._exit(1)", True), ("None", False)], ids=["as Ray does in C++", "well"])
def test_a_process_that_ray_ends_while_it_connects_has_last_words(tmp_path: Path, end: str, told: bool) -> None:
    done = in_its_own_group(STARTS.format(end=end), tmp_path)
    sentence = "error: this process ended while Ray started: a server of Ray or itself was killed\n  → run again"
    assert (sentence in done.stderr) == told, done.stderr


def in_its_own_group(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}"}
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
        start_new_session=True,
    )


TOLD_TO_STOP = """
import os, signal, time
from nightshift.cluster.connection import start_ray

def stop(*_):
    raise KeyboardInterrupt

signal.signal(signal.{name}, stop)
start_ray(1)
try:
    os.killpg(0, signal.{name})
    time.sleep(600)
except KeyboardInterrupt:
    time.sleep(3)  # as training that writes a checkpoint
    print("saved")
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_process_that_is_told_to_stop_together_with_its_cluster_stops_by_itself(tmp_path: Path, name: str) -> None:
    """A terminal that closes and a batch system send the signal to the whole group, Ray's servers among it."""
    done = in_its_own_group(TOLD_TO_STOP.format(name=name), tmp_path)
    assert "saved" in done.stdout and "was killed" not in done.stderr, done.stderr


RESTARTED = """
import ray, time
from nightshift.cluster import connection

connection.start_ray(1)
ray.shutdown()
connection.start_ray(1)
time.sleep(10 * connection._POLL_SECONDS)
ray.shutdown()
time.sleep(10 * connection._POLL_SECONDS)
"""


@pytest.mark.slow
def test_a_small_cluster_that_is_shut_down_and_started_again_ends_nothing(tmp_path: Path) -> None:
    done = in_its_own_group(RESTARTED, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
