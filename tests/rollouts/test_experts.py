"""The expert's processes: none stays when it is not needed, and one that dies is replaced."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess

import numpy as np
import pytest
import torch

from nightshift import config, envs
from nightshift.policies.expert import Expert
from nightshift.rollouts.engine import EngineSettings
from nightshift.rollouts.experts import ExpertProcesses
from nightshift.rollouts.local import LocalPool
from nightshift.types import RolloutRequest, Scene
from tests.rollouts.parts import NO_CAMERAS, assert_same
from tests.waiting import SECONDS

ENV = config.Env(suite="fake", tasks=(), protocol="openvla-oft", horizon=12, cameras=NO_CAMERAS)
IN_PROCESSES = EngineSettings(device=torch.device("cpu"), threads=2, requests_at_once=2)

pytestmark = pytest.mark.usefixtures("forked_processes")

PARENT = """
import multiprocessing, time
from nightshift import config, envs
from nightshift.rollouts.experts import ExpertProcesses
cameras = config.Cameras(names=(), size=16, shadows=False)
env = config.Env(suite="fake", tasks=(), protocol="openvla-oft", horizon=12, cameras=cameras)
fleet = envs.make_fleet(envs.tasks(env)[0], env)
fleet.reset("train", [0])
experts = ExpertProcesses(1, "fake")
experts.for_episode()(fleet.scene(0))
print(*(child.pid for child in multiprocessing.active_children()), flush=True)
time.sleep(600)
"""


def scene() -> Scene:
    fleet = envs.make_fleet(envs.tasks(ENV)[0], ENV)
    fleet.reset("train", [0])
    return fleet.scene(0)


def wanted() -> list[RolloutRequest]:
    return [
        RolloutRequest(task="near", split="train", init_state=state, controller="expert", seed=state)
        for state in range(4)
    ]


@pytest.fixture
def others() -> set[BaseProcess]:
    """Processes that the tests of other files have left to be used again."""
    return set(multiprocessing.active_children())


@pytest.fixture
def experts() -> Iterator[ExpertProcesses]:
    made = ExpertProcesses(1, ENV.suite)
    yield made
    made.close()


def is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError, FileNotFoundError), open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_processes_of_a_parent_that_is_killed_end() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert pids
    assert all(is_alive(pid) for pid in pids)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + SECONDS
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    parent.stdout.close()


def test_what_a_process_imports_has_no_torch() -> None:
    """It takes seconds and 200 MB."""
    program = "import nightshift.rollouts.experts, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_process_that_dies_is_replaced(others: set[BaseProcess], experts: ExpertProcesses) -> None:
    expected = Expert().act(scene())
    act = experts.for_episode()
    np.testing.assert_array_equal(act(scene()), expected)
    (process,) = set(multiprocessing.active_children()) - others
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with pytest.raises(BrokenProcessPool):
        act(scene())
    np.testing.assert_array_equal(act(scene()), expected)


def test_ctrl_c_leaves_a_process_to_the_one_that_asks(others: set[BaseProcess], experts: ExpertProcesses) -> None:
    """Ctrl-C reaches all processes of a terminal, and each would print a traceback."""
    act = experts.for_episode()
    expected = act(scene())
    (process,) = set(multiprocessing.active_children()) - others
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    np.testing.assert_array_equal(act(scene()), expected)
    assert process.is_alive()


def test_one_process_decides_for_an_episode_and_another_for_the_next(others: set[BaseProcess]) -> None:
    experts = ExpertProcesses(2, ENV.suite)
    first, second = experts.for_episode(), experts.for_episode()
    for act, running in [(first, 1), (first, 1), (second, 2), (first, 2), (experts.for_episode(), 2)]:
        act(scene())
        assert len(set(multiprocessing.active_children()) - others) == running
    experts.close()
    assert set(multiprocessing.active_children()) == others


def test_no_process_stays_after_a_run_and_the_next_run_plays_the_same(others: set[BaseProcess]) -> None:
    pool = LocalPool(ENV, IN_PROCESSES)
    runs = []
    for _ in range(2):
        running = pool.run(wanted())
        played = dict([next(running)])
        assert set(multiprocessing.active_children()) > others, "the expert decided in this process"
        played.update(running)
        assert set(multiprocessing.active_children()) == others
        runs.append(played)
    pool.close()
    for index in range(len(wanted())):
        assert_same(runs[0][index][0], runs[1][index][0])
