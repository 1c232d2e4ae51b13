"""A Ray that a pool starts for itself, with a worker in a new interpreter, as where no RAY_ADDRESS is set."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import ray

from nightshift.cluster import connection
from nightshift.project import environment
from nightshift.rollouts.local import LocalPool
from nightshift.rollouts.pool import RayPool
from tests.rollouts.test_pool import ENV, POLICY, actions, requests, same, worker_pids

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(scope="module")
def handlers() -> Iterator[dict[int, object]]:
    """Handlers that are set before this Ray starts: the tests before this file may have left those of another Ray."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in SIGNALS}
    yield {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, handlers: dict[int, object]) -> Iterator[RayPool]:
    """With the settings of the tools that every command makes first, and without tokens: Ray would ask for them in
    this process from then on, and the clusters of other tests have none."""
    with mock.patch.dict(os.environ, RAY_AUTH_MODE="disabled"):
        environment.apply(tmp_path_factory.mktemp("project"))
        pool = RayPool(1, ENV)
    yield pool
    pool.close()


def test_its_worker_and_this_process_play_the_same_episodes(pool: RayPool) -> None:
    here = dict(LocalPool(ENV).run(requests(5), POLICY))
    assert same(actions(dict(pool.run(requests(5), POLICY))), actions(here))


def test_a_worker_has_the_priority_of_its_driver(pool: RayPool) -> None:
    list(pool.run(requests(1), POLICY))
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in worker_pids()} == {os.nice(0)}


def test_ray_leaves_the_signal_handlers_alone(pool: RayPool, handlers: dict[int, object]) -> None:
    assert ray.is_initialized()
    assert {number: signal.getsignal(number) for number in SIGNALS} == handlers


@pytest.mark.parametrize(
    ("memory_gb", "shared_gb", "expected_gb"),
    [(64, 32, 16), (16, 8, 4), (256, 128, 16), (64, 4, 3), (64, 0.0625, 0.25)],
)
def test_the_object_store_has_room_for_images_where_the_machine_has(
    memory_gb: float, shared_gb: float, expected_gb: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": int(memory_gb * 2**30) // 4096}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    free = int(shared_gb * 2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    monkeypatch.setattr(connection, "_SHARED_MEMORY", tmp_path)
    assert connection._object_store_bytes() == expected_gb * 2**30
