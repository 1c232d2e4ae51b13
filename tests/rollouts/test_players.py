"""Processes that play the expert's requests: the same episodes as in this process, whatever happens to a process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from nightshift import config, envs
from nightshift.envs.fake import FakeFleet, FakeSuite
from nightshift.errors import RolloutError, SimulatorError
from nightshift.rollouts import player_processes
from nightshift.rollouts.base import MakeFleet
from nightshift.rollouts.engine import BUSY, SIMULATION, EngineSettings
from nightshift.rollouts.local import LocalPool
from nightshift.rollouts.players import ExpertPlayers
from nightshift.types import RolloutRequest, Task, Trajectory
from tests.rollouts import faulty
from tests.rollouts.faulty import Faulty, FaultyFleet, Unstable
from tests.rollouts.parts import CAMERAS, NO_CAMERAS, Seeing, SeeingFleet, assert_same

ENV = config.Env(suite="fake", tasks=(), protocol="openvla-oft", horizon=12, cameras=NO_CAMERAS)
SEEING_ENV = ENV.model_copy(update={"cameras": config.Cameras(names=("agentview",), size=32, shadows=False)})
TWO_PROCESSES = EngineSettings(device=torch.device("cpu"), threads=2, requests_at_once=4)
WANTED = [
    RolloutRequest(task=task, split="train", init_state=state, controller="expert", seed=3, disturbance=0.15, count=2)
    for task in ("near", "far")
    for state in range(3)
]

pytestmark = pytest.mark.usefixtures("forked_processes")


@pytest.fixture
def others() -> set[BaseProcess]:
    """Processes that the tests of other files have left to be used again."""
    return set(multiprocessing.active_children())


@pytest.fixture(scope="module")
def expected() -> dict[int, list[Trajectory]]:
    """Played one after the other in this process."""
    return dict(LocalPool(ENV).run(WANTED))


def assert_all_same(played: dict[int, list[Trajectory]], expected: dict[int, list[Trajectory]]) -> None:
    assert played.keys() == expected.keys()
    for index, group in expected.items():
        for one, other in zip(group, played[index], strict=True):
            assert_same(one, other)


def test_episodes_are_those_of_one_process_and_their_time_is_counted(expected: dict[int, list[Trajectory]]) -> None:
    pool = LocalPool(ENV, TWO_PROCESSES)
    assert_all_same(dict(pool.run(WANTED)), expected)
    assert pool.spent()[BUSY] > pool.spent()[SIMULATION] > 0


def test_images_of_every_step_come_back() -> None:
    env = ENV.model_copy(update={"cameras": CAMERAS})
    here = dict(LocalPool(env, make_fleet=seeing).run(WANTED))
    assert "agentview" in here[0][0].observations
    assert_all_same(dict(LocalPool(env, TWO_PROCESSES, make_fleet=seeing).run(WANTED)), here)


@pytest.mark.parametrize("make_fleet", [envs.make_fleet, Unstable(frozenset({1}))], ids=["stable", "unstable"])
def test_images_are_drawn_from_the_states_of_each_episode(make_fleet: MakeFleet) -> None:
    here = dict(LocalPool(SEEING_ENV, make_fleet=make_fleet).run(WANTED))
    assert_all_same(dict(LocalPool(SEEING_ENV, TWO_PROCESSES, make_fleet=make_fleet).run(WANTED)), here)
    one, other = here[2]
    assert not np.array_equal(one.final["agentview"], other.final["agentview"])


def test_a_state_that_always_fails_has_no_images_and_the_rest_is_drawn() -> None:
    pool = LocalPool(SEEING_ENV, TWO_PROCESSES, make_fleet=Faulty({1: faulty.raise_something}))
    for index, group in pool.run(WANTED):
        assert all(episode.valid == (WANTED[index].init_state != 1) for episode in group)
        assert all(("agentview" in episode.final) == episode.valid for episode in group)


def test_a_suite_that_cannot_draw_recorded_states_draws_while_it_plays(monkeypatch: pytest.MonkeyPatch) -> None:
    here = dict(LocalPool(SEEING_ENV, TWO_PROCESSES).run(WANTED))
    monkeypatch.setattr(FakeSuite, "redraws", False)
    monkeypatch.setattr(FakeFleet, "redraw", None)
    assert_all_same(dict(LocalPool(SEEING_ENV, TWO_PROCESSES).run(WANTED)), here)


def test_a_request_whose_images_fail_once_is_drawn_again() -> None:
    env = ENV.model_copy(update={"cameras": CAMERAS})
    here = dict(LocalPool(env, make_fleet=seeing).run(WANTED[:1]))
    drawing = FailsOnce()
    assert_all_same(dict(LocalPool(env, TWO_PROCESSES, make_fleet=drawing).run(WANTED[:1])), here)
    assert drawing.failed


def test_images_that_are_no_longer_wanted_leave_no_process(others: set[BaseProcess]) -> None:
    env = ENV.model_copy(update={"cameras": CAMERAS})
    two_at_once = replace(TWO_PROCESSES, requests_at_once=2)
    running = LocalPool(env, two_at_once, make_fleet=seeing).run(WANTED)
    next(running)
    assert isinstance(running, Generator)
    running.close()
    assert set(multiprocessing.active_children()) == others


@pytest.mark.parametrize("env", [ENV, SEEING_ENV], ids=["without images", "with images"])
def test_an_interrupt_ends_the_wait_for_simulators_that_hang(env: config.Env, others: set[BaseProcess]) -> None:
    pool = LocalPool(env, TWO_PROCESSES, make_fleet=Faulty(dict.fromkeys(range(3), faulty.hang)))
    interrupt = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        list(pool.run(WANTED))
    assert set(multiprocessing.active_children()) == others


def test_a_process_that_is_killed_is_replaced(others: set[BaseProcess], expected: dict[int, list[Trajectory]]) -> None:
    running = LocalPool(ENV, TWO_PROCESSES).run(WANTED)
    played = dict([next(running)])
    first = set(multiprocessing.active_children()) - others
    for process in first:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
    played.update(running)
    assert first
    assert_all_same(played, expected)


def test_a_simulator_that_segfaults_once_changes_nothing(tmp_path: Path, expected: dict[int, list[Trajectory]]) -> None:
    (tmp_path / "1").touch()
    pool = LocalPool(ENV, TWO_PROCESSES, make_fleet=Faulty({1: faulty.segfault}, once=tmp_path))
    assert_all_same(dict(pool.run(WANTED)), expected)
    assert not list(tmp_path.iterdir()), "no simulator failed"


def test_a_simulator_that_hangs_once_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[int, list[Trajectory]]
) -> None:
    (tmp_path / "1").touch()
    clock = SimpleNamespace(monotonic=lambda: 0.0 if (tmp_path / "1").exists() else 100.0)  # which passes in the hang
    monkeypatch.setattr(player_processes, "time", clock)
    fleets = Faulty({1: faulty.hang}, once=tmp_path)
    assert_all_same(dict(ExpertPlayers(ENV, TWO_PROCESSES, fleets, count=2, timeout=1.0).run(WANTED)), expected)


@pytest.mark.parametrize("fail", [faulty.segfault, faulty.raise_something])
def test_a_state_that_always_fails_is_invalid_and_the_rest_is_played(
    fail: Callable[[], None], expected: dict[int, list[Trajectory]]
) -> None:
    pool = LocalPool(ENV, TWO_PROCESSES, make_fleet=Faulty({1: fail}))
    played = dict(pool.run(WANTED))
    lost = [index for index, request in enumerate(WANTED) if request.init_state == 1]
    assert not any(episode.valid for index in lost for episode in played[index])
    sound = {index: group for index, group in expected.items() if index not in lost}
    assert_all_same({index: played[index] for index in sound}, sound)


def test_an_error_for_people_ends_the_run_and_every_process(others: set[BaseProcess]) -> None:
    with pytest.raises(SimulatorError, match="no mesh of the far task") as caught:
        list(LocalPool(ENV, TWO_PROCESSES, make_fleet=without_mesh).run(WANTED))
    assert caught.value.next_step == "download it"
    assert set(multiprocessing.active_children()) == others


def test_answers_that_are_no_longer_wanted_leave_no_process(others: set[BaseProcess]) -> None:
    running = LocalPool(ENV, TWO_PROCESSES).run(WANTED)
    next(running)
    assert len(set(multiprocessing.active_children()) - others) == TWO_PROCESSES.threads
    assert isinstance(running, Generator)
    running.close()
    assert set(multiprocessing.active_children()) == others


def test_a_simulator_that_fails_everywhere_ends_the_run() -> None:
    pool = LocalPool(ENV, TWO_PROCESSES, make_fleet=Faulty(dict.fromkeys(range(3), faulty.raise_something)))
    with pytest.raises(RolloutError, match="failed on 3 of 6 init states"):
        list(pool.run(WANTED))


def without_mesh(task: Task, env: config.Env) -> FaultyFleet:
    if task.name == "far":
        raise SimulatorError("no mesh of the far task", "download it")
    return Faulty({})(task, env)


def seeing(task: Task, env: config.Env) -> SeeingFleet:
    return Seeing()(task, env)


@dataclass
class FailsOnce:
    """Makes fleets of which the first that draws fails."""

    failed: bool = False

    def __call__(self, task: Task, env: config.Env) -> SeeingFleet:
        made = seeing(task, env)
        made.redraw = self._once(made.redraw)  # type: ignore[method-assign]
        return made

    def _once(self, redraw: Callable[..., Mapping[str, NDArray[np.uint8]]]) -> Callable[..., Any]:
        def fail_once(*arguments: Any) -> Mapping[str, NDArray[np.uint8]]:
            if not self.failed:
                self.failed = True
                raise MemoryError("no room for the images")
            return redraw(*arguments)

        return fail_once
