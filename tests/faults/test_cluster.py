"""Several Ray nodes, as on a cluster: one is lost, one is elsewhere, one is another, and some are not there yet."""

from __future__ import annotations

import itertools
import logging
import shutil
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from nightshift import config, envs
from nightshift.cluster import capacity, learning_versions, version_check
from nightshift.cluster.capacity import Capacity
from nightshift.cluster.connection import start_ray
from nightshift.errors import RolloutError
from nightshift.rollouts.engine import EngineSettings
from nightshift.rollouts.local import LocalPool
from nightshift.rollouts.pool import RayPool
from nightshift.rollouts.stragglers import Attempt
from nightshift.types import RolloutRequest, Trajectory
from tests.conftest import REPOSITORY
from tests.envs.test_suites import needs_assets
from tests.faults.conftest import AddNode, adding_nodes, requested_bundles
from tests.rollouts.parts import NO_CAMERAS
from tests.rollouts.test_pool import ENV, POLICY, actions, requests, same

MINI = config.Env(suite="libero_mini", tasks=("lift_cube",), protocol="openvla-oft", horizon=4, cameras=NO_CAMERAS)
OBJECT = config.Env(
    suite="libero_object",
    tasks=("pick_up_the_milk_and_place_it_in_the_basket",),
    protocol="openvla-oft",
    horizon=4,
    cameras=NO_CAMERAS,
)
WANTED = requests(5)


def expert(task: str, state: int) -> RolloutRequest:
    return RolloutRequest(task=task, split="train", init_state=state, controller="expert", seed=0)


def write_drawn_states(root: Path, env: config.Env, states: np.ndarray) -> None:
    """As the stage `states` leaves them."""
    folder = root / "data" / "init_states" / env.suite
    folder.mkdir(parents=True)
    np.savez(folder / f"{env.tasks[0]}.npz", train=states)


@pytest.fixture
def elsewhere(add_node: AddNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node that was started in an empty folder, as on another machine; returns the folder."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        patch.setenv("NUMBA_CACHE_DIR", str(REPOSITORY / ".state" / "libero" / "numba"))  # compiling takes seconds
        add_node(1)
    return folder


Episodes = dict[int, list[Trajectory]]


@dataclass
class PoolLife:
    """What a pool of four workers did while its cluster had no node, one, two, and one again."""

    warnings: list[str]
    requested: list[list[dict[str, float]]]
    """From an autoscaler: after each run, and after the pool was closed."""
    workers: list[int]
    played: list[Episodes]
    """Both by run: on the first node, on both, and after the second was lost."""


@pytest.fixture(scope="module")
def life(cluster: Cluster, forking: dict[str, Any]) -> PoolLife:
    """One pool for several tests: a worker takes seconds to start."""
    life = PoolLife([], [], [], [])

    class AddsNodeWhenTold(logging.Handler):
        """Stands in for a person who reads the warnings, or for an autoscaler."""

        def emit(self, record: logging.LogRecord) -> None:
            life.warnings.append(record.getMessage())
            if len(life.warnings) == 2:
                add_node(1)

    def play() -> None:
        life.played.append(dict(pool.run(WANTED, POLICY)))
        life.workers.append(pool.workers)
        life.requested.append(requested_bundles(cluster.address))

    handler = AddsNodeWhenTold()
    capacity._log.addHandler(handler)
    with adding_nodes(cluster, forking) as add_node, pytest.MonkeyPatch.context() as patch:
        patch.setattr(capacity, "REMIND_SECONDS", 0.5)
        pool = RayPool(4, ENV)
        play()
        lost = add_node(3)
        cluster.wait_for_nodes()
        play()
        cluster.remove_node(lost, allow_graceful=False)
        cluster.wait_for_nodes()
        play()
        pool.close()
        life.requested.append(requested_bundles(cluster.address))
    capacity._log.removeHandler(handler)
    return life


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return actions(dict(LocalPool(ENV).run(WANTED, POLICY)))


def test_a_cluster_without_any_cpu_is_waited_for_and_said_so(life: PoolLife) -> None:
    said = "machine.workers is 4, one CPU each, and the cluster has none: waiting for the first"
    assert all(said in warning for warning in life.warnings[:2])


def test_fewer_cpus_than_workers_play_all_and_a_new_node_is_taken_up(life: PoolLife, expected: list[Any]) -> None:
    said = "machine.workers is 4, one CPU each, and the cluster has 1 of them"
    assert any(said in warning for warning in life.warnings)
    assert life.workers[:2] == [1, 4]
    assert all(same(actions(played), expected) for played in life.played[:2])


def test_a_node_that_is_lost_while_workers_idle_costs_no_episode_either(life: PoolLife, expected: list[Any]) -> None:
    """Its three workers are dead when they are asked again; a request that meets all of them is not to blame."""
    played = life.played[2]
    assert all(episode.valid for group in played.values() for episode in group)
    assert same(actions(played), expected)
    assert life.workers[2] == 1


def test_room_for_workers_is_requested_from_an_autoscaler_until_the_pool_closes(life: PoolLife) -> None:
    """While nodes come and go."""
    assert life.requested == [[{"CPU": 1}] * 4] * 3 + [[]]


def test_room_is_requested_on_one_node_for_each_worker(cluster: Cluster, add_node: AddNode) -> None:
    """Loose CPUs of several nodes are of no use to a worker with several threads."""
    add_node(3)
    two_threads = EngineSettings(device=torch.device("cpu"), threads=2, requests_at_once=2)
    pool = RayPool(4, ENV, two_threads)
    assert pool.capacity.available_workers() == 1
    assert requested_bundles(cluster.address) == [{"CPU": 2}] * 4
    pool.close()


def test_a_node_that_is_lost_costs_no_episode_and_changes_none(cluster: Cluster, add_node: AddNode) -> None:
    lost, _ = add_node(1), add_node(1)
    pool = RayPool(2, ENV)  # as many as there is room for: the one that is lost cannot be replaced
    wanted = requests(30)
    results: Episodes = {}
    for index, trajectories in pool.run(wanted, POLICY):
        assert index not in results
        results[index] = trajectories
        if len(results) == 5:
            cluster.remove_node(lost, allow_graceful=False)
    assert same(actions(results), actions(dict(LocalPool(ENV).run(wanted, POLICY))))
    assert not lost.any_processes_alive()
    assert pool.spent()["busy"] > 0


def test_a_worker_whose_place_was_lost_before_it_started_leaves_its_request_to_another(
    cluster: Cluster, add_node: AddNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for a place until its timeout, while the worker in the only place is idle."""
    add_node(1)
    places = iter([2])
    real = capacity._places
    monkeypatch.setattr(capacity, "_places", lambda each: next(places, None) or real(each))
    looks = itertools.count()

    def is_stuck(attempt: Attempt, timeout: float) -> bool:
        attempt._heartbeat.seconds_since_progress()
        assert attempt.has_begun or not pool._idle or next(looks) < 20, "it is waited for"
        return False

    monkeypatch.setattr(Attempt, "is_stuck", is_stuck)
    pool = RayPool(2, ENV)
    assert len(dict(pool.run(WANTED, POLICY))) == len(WANTED)


def test_drawn_states_travel_to_a_node_that_has_none_of_the_projects_files(elsewhere: Path) -> None:
    shipped = LocalPool(MINI)
    drawn = envs.PortableFleets({"lift_cube": drawn_like_shipped()})
    played = dict(RayPool(1, MINI, make_fleet=drawn).run([expert("lift_cube", 1)]))
    assert same(actions(played), actions(dict(shipped.run([expert("lift_cube", 7)]))))
    assert not list(elsewhere.iterdir()), "a worker writes nothing where it happens to be"


def drawn_like_shipped() -> np.ndarray:
    """Two states, the second of which is the seventh of those that are shipped."""
    from nightshift.envs.mini.suite import LIBERO_MINI

    return LIBERO_MINI.load_init_states(envs.tasks(MINI)[0], "train")[[3, 7]]


def test_a_pool_takes_along_what_the_stage_states_drew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert envs.portable_fleets(OBJECT).drawn == {}
    states = np.arange(6.0).reshape(2, 3)
    write_drawn_states(tmp_path, OBJECT, states)
    ((task, taken),) = envs.portable_fleets(OBJECT).drawn.items()
    assert task == OBJECT.tasks[0]
    assert np.array_equal(taken, states)


@needs_assets
@pytest.mark.slow
def test_a_real_suite_plays_its_drawn_states_on_a_node_that_has_none_of_them(
    elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nightshift.envs.libero.suites import LIBERO_OBJECT

    (task,) = envs.tasks(OBJECT)
    write_drawn_states(tmp_path, OBJECT, LIBERO_OBJECT.load_init_states(task, "eval")[:3])
    monkeypatch.chdir(tmp_path)
    played = dict(RayPool(1, OBJECT).run([expert(task.name, 2)]))
    here = dict(LocalPool(OBJECT).run([expert(task.name, 2)]))
    assert same(actions(played), actions(here))
    assert not list(elsewhere.iterdir())


def test_a_node_with_other_code_is_refused_by_name(add_node: AddNode, tmp_path: Path) -> None:
    other = tmp_path / "nightshift"
    shutil.copytree(REPOSITORY / "src" / "nightshift", other, ignore=shutil.ignore_patterns("__pycache__"))
    with (other / "envs" / "fake.py").open("a") as source:
        source.write("# a line that the driver does not have\n")
    add_node(1, forks=False, env_vars={"PYTHONPATH": str(tmp_path)})
    with pytest.raises(RolloutError, match=f"node {socket.gethostname()} is not like the driver's") as caught:
        list(RayPool(1, ENV).run(requests(1), POLICY))
    assert learning_versions.CODE in caught.value.what
    assert "install the driver's commit" in caught.value.next_step


def test_a_node_is_refused_for_every_version_that_differs_and_for_no_other() -> None:
    versions = version_check.versions("libero_mini")
    assert version_check.mismatch_error(versions, "libero_mini") is None
    mismatch = version_check.mismatch_error({**versions, "mujoco": "3.2.0", "torch": "2.0.0"}, "libero_mini")
    assert mismatch is not None
    has = f"mujoco {versions['mujoco']}, the driver 3.2.0; torch {versions['torch']}, the driver 2.0.0"
    assert mismatch.what.endswith(f"it has {has}")


def test_a_worker_with_a_share_of_a_gpu_needs_it_beside_its_cpus(cluster: Cluster, add_node: AddNode) -> None:
    add_node(4)
    add_node(2, num_gpus=1)
    start_ray(cpus=1)
    needs = Capacity(6, cpus_each=1, gpus_each=1 / 3)
    assert needs.available_workers() == 2
    assert requested_bundles(cluster.address) == [{"CPU": 1, "GPU": 1 / 3}] * 6
    needs.release()


def test_an_address_where_nothing_listens_is_an_error_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and never listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        started = time.monotonic()
        with pytest.raises(RolloutError, match=f"no Ray cluster answers at RAY_ADDRESS={address}") as caught:
            RayPool(1, ENV)
    assert "ray start --head" in caught.value.next_step
    assert time.monotonic() - started < 60, "Ray would have tried for a quarter of an hour"


@pytest.mark.parametrize("address", ["nonsense", "ray://127.0.0.1:1"])
def test_an_address_that_ray_refuses_is_an_error_for_people(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(RolloutError, match=f"RAY_ADDRESS={address} cannot be joined: "):
        RayPool(1, ENV)
    assert not ray.is_initialized()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
