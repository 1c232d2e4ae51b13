"""Processes in which policies play without Ray: the same episodes as in this process, whatever happens to a process."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nightshift import config
from nightshift.errors import RolloutError, SimulatorError
from nightshift.policies.gaussian_mlp import GaussianMlp
from nightshift.policies.snapshot import snapshot
from nightshift.project import packages
from nightshift.rollouts import player_processes
from nightshift.rollouts.engine import BUSY, INFERENCE, EngineSettings
from nightshift.rollouts.local import LocalPool
from nightshift.rollouts.opening import open_pool
from nightshift.rollouts.players import PolicyPlayers
from nightshift.types import Observation, RolloutRequest, Split, Task, Trajectory
from tests.rollouts import faulty
from tests.rollouts.faulty import Faulty
from tests.rollouts.parts import CAMERAS, SeeingFleet, assert_same, policy
from tests.rollouts.test_players import ENV, assert_all_same, seeing, without_mesh

SEEN = ENV.model_copy(update={"cameras": CAMERAS})
SETTINGS = EngineSettings(device=torch.device("cpu"), threads=2, requests_at_once=2)
WANTED = [
    RolloutRequest(task=task, split="train", init_state=state, controller="sample", seed=3, temperature=0.7, count=2)
    for task in ("near", "far")
    for state in range(5)
]

pytestmark = pytest.mark.usefixtures("forked_processes")


@pytest.fixture(scope="module")
def expected() -> dict[int, list[Trajectory]]:
    return dict(LocalPool(ENV).run(WANTED, snapshot(policy())))


@pytest.fixture
def started() -> Iterator[Callable[[], set[BaseProcess]]]:
    """Processes that run and did not before the test."""
    before = set(multiprocessing.active_children())
    yield lambda: set(multiprocessing.active_children()) - before
    for process in set(multiprocessing.active_children()) - before:
        process.kill()


def test_episodes_are_those_of_one_process_and_their_time_is_counted(expected: dict[int, list[Trajectory]]) -> None:
    pool = LocalPool(ENV, SETTINGS, workers=2)
    assert_all_same(dict(pool.run(WANTED, snapshot(policy()))), expected)
    assert pool.workers == 2
    assert pool.spent()[BUSY] > pool.spent()[INFERENCE] > 0
    pool.close()


def test_each_process_draws_what_it_plays() -> None:
    wanted = [replace(request, cameras=("agentview",)) for request in WANTED]
    here = dict(LocalPool(SEEN, make_fleet=seeing).run(wanted, snapshot(policy())))
    pool = LocalPool(SEEN, SETTINGS, workers=2, make_fleet=seeing)
    played = dict(pool.run(wanted, snapshot(policy())))
    pool.close()
    assert_all_same(played, here)
    assert played[0][0].observations["agentview"].any()


def test_processes_stay_and_play_with_the_next_policy(started: Callable[[], set[BaseProcess]]) -> None:
    other = policy()
    for parameter in other.parameters():
        parameter.data.add_(0.3)
    pool = LocalPool(ENV, SETTINGS, workers=2)
    list(pool.run(WANTED, snapshot(policy())))
    first = started()
    played = dict(pool.run(WANTED, snapshot(other, 1)))
    assert len(first) == 2
    assert started() == first
    assert_all_same(played, dict(LocalPool(ENV).run(WANTED, snapshot(other, 1))))
    pool.close()
    assert not started()


def test_a_process_gets_what_it_lacks_of_a_policy_and_frozen_weights_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *_ = policy().state_dict()
    monkeypatch.setattr(GaussianMlp, "frozen", frozenset({first}))
    one = snapshot(policy())
    other = snapshot(policy(), 1, one.frozen)
    process = player_processes._Player(multiprocessing.Process(), multiprocessing.Pipe()[0])
    sent = [player_processes._not_there_yet(version, process) for version in (one, one, other)]
    assert sent[0] is one
    assert sent[1] is None
    assert sent[2] is not None
    assert sent[2].frozen is not None
    assert one.frozen is not None
    assert (sent[2].weights, sent[2].frozen.token, sent[2].frozen.weights) == (other.weights, one.frozen.token, {})


def test_two_runs_that_take_turns_keep_their_policies(
    started: Callable[[], set[BaseProcess]], expected: dict[int, list[Trajectory]]
) -> None:
    other = policy()
    for parameter in other.parameters():
        parameter.data.add_(0.3)
    pool = LocalPool(ENV, SETTINGS, workers=2)
    running = pool.run(WANTED, snapshot(policy()))
    played = dict([next(running)])
    between = dict(pool.run(WANTED, snapshot(other, 1)))
    played.update(running)
    assert len(started()) == 2
    pool.close()
    assert_all_same(played, expected)
    assert not np.array_equal(between[0][0].actions, expected[0][0].actions)


def test_a_process_that_is_killed_is_replaced(
    started: Callable[[], set[BaseProcess]], expected: dict[int, list[Trajectory]]
) -> None:
    pool = LocalPool(ENV, SETTINGS, workers=2)
    running = pool.run(WANTED, snapshot(policy()))
    played = dict([next(running)])
    killed = started()
    for process in killed:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
    played.update(running)
    assert len(killed) == 2
    assert_all_same(played, expected)
    pool.close()


def test_processes_that_die_between_runs_count_as_no_failure(started: Callable[[], set[BaseProcess]]) -> None:
    wanted = [replace(request, controller="greedy", temperature=0.0, count=1) for request in WANTED[:2]]
    pool = LocalPool(ENV, SETTINGS, workers=2)
    first = dict(pool.run(wanted, snapshot(policy())))
    for process in started():
        process.kill()
        process.join()
    for _ in range(3):  # a greedy request is given up after two deaths
        assert_all_same(dict(pool.run(wanted, snapshot(policy()))), first)
    pool.close()


def test_what_ends_a_process_is_told() -> None:
    pool = LocalPool(ENV, SETTINGS, workers=2, make_fleet=short_sighted)
    with pytest.raises(RolloutError, match=r"the last was .*: RuntimeError\('"):
        list(pool.run(WANTED, snapshot(policy())))
    pool.close()


def test_a_simulator_that_segfaults_once_changes_nothing(tmp_path: Path, expected: dict[int, list[Trajectory]]) -> None:
    (tmp_path / "1").touch()
    pool = LocalPool(ENV, SETTINGS, workers=2, make_fleet=Faulty({1: faulty.segfault}, once=tmp_path))
    assert_all_same(dict(pool.run(WANTED, snapshot(policy()))), expected)
    assert not list(tmp_path.iterdir()), "no simulator failed"
    pool.close()


def test_a_simulator_that_hangs_once_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[int, list[Trajectory]]
) -> None:
    (tmp_path / "1").touch()
    clock = SimpleNamespace(monotonic=lambda: 0.0 if (tmp_path / "1").exists() else 100.0)  # which passes in the hang
    monkeypatch.setattr(player_processes, "time", clock)
    fleets = Faulty({1: faulty.hang}, once=tmp_path)
    one_at_a_time = replace(SETTINGS, threads=1, requests_at_once=1)
    players = PolicyPlayers(ENV, one_at_a_time, fleets, count=1, timeout=1.0)
    wanted = [1, 0, 2]  # the process begins with the one that hangs: an answer before it may be read in the hang
    played = dict(players.run([WANTED[number] for number in wanted], snapshot(policy())))
    assert_all_same(played, {position: expected[number] for position, number in enumerate(wanted)})
    players.close()


@pytest.mark.parametrize("fail", [faulty.segfault, faulty.raise_something])
def test_a_state_that_always_fails_is_invalid_and_the_rest_is_played(
    fail: Callable[[], None], expected: dict[int, list[Trajectory]]
) -> None:
    pool = LocalPool(ENV, SETTINGS, workers=2, make_fleet=Faulty({1: fail}))
    played = dict(pool.run(WANTED, snapshot(policy())))
    pool.close()
    for index, group in expected.items():
        for one, other in zip(group, played[index], strict=True):
            if WANTED[index].init_state == 1:
                assert not other.valid
            else:
                assert_same(one, other)


def test_an_error_for_people_ends_the_run_and_every_process_that_plays(
    started: Callable[[], set[BaseProcess]],
) -> None:
    pool = LocalPool(ENV, SETTINGS, workers=2, make_fleet=without_mesh)
    with pytest.raises(SimulatorError, match="no mesh of the far task") as caught:
        list(pool.run(WANTED, snapshot(policy())))
    assert caught.value.next_step == "download it"
    pool.close()
    assert not started()


def test_a_simulator_that_fails_everywhere_ends_the_run() -> None:
    pool = LocalPool(ENV, SETTINGS, workers=2, make_fleet=Faulty(dict.fromkeys(range(5), faulty.raise_something)))
    with pytest.raises(RolloutError, match="failed on 3 of 10 init states"):
        list(pool.run(WANTED, snapshot(policy())))
    pool.close()


def test_answers_that_are_no_longer_wanted_leave_no_process_that_plays(started: Callable[[], set[BaseProcess]]) -> None:
    pool = LocalPool(ENV, SETTINGS, workers=2)
    running = pool.run(WANTED, snapshot(policy()))
    next(running)
    assert isinstance(running, Generator)
    running.close()
    pool.close()
    assert not started()


def test_workers_need_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = config.load(Path(__file__).parents[2] / "params.yaml").machine.model_copy(update={"workers": 2})
    monkeypatch.setattr(packages, "is_installed", lambda package: package != "ray")
    pool = open_pool(machine, ENV, torch.device("cpu"))
    assert isinstance(pool, LocalPool)
    assert pool.workers == 2
    pool.close()


def short_sighted(task: Task, env: config.Env) -> SeeingFleet:
    """What they show has other shapes than the policy takes."""
    fleet = seeing(task, env)
    reset = fleet.reset

    def reset_to_less(split: Split, init_states: Sequence[int]) -> Observation:
        shown = reset(split, init_states)
        return {**shown, "objects": shown["objects"][:, :1]}

    fleet.reset = reset_to_less  # type: ignore[method-assign]
    return fleet
