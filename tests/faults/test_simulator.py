"""A simulator that segfaults, hangs or raises costs time and, at worst, its own episodes; never the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import ray

from nightshift import config
from nightshift.errors import RolloutError
from nightshift.policies.gaussian_mlp import GaussianMlp
from nightshift.policies.snapshot import snapshot
from nightshift.rollouts.base import MakeFleet, Pool
from nightshift.rollouts.local import LocalPool
from nightshift.rollouts.pool import RayPool
from nightshift.types import RolloutRequest, Trajectory
from tests.rollouts import faulty
from tests.rollouts.faulty import Faulty
from tests.rollouts.parts import NO_CAMERAS

ENV = config.Env(suite="fake", tasks=("near",), protocol="openvla-oft", horizon=12, cameras=NO_CAMERAS)
POLICY = snapshot(GaussianMlp(inputs={"objects": 3, "task": 2}, hidden=[8], chunk=1, action_dim=7))
TIMEOUT = 3.0
REQUESTS = [
    RolloutRequest(task="near", split="train", init_state=state, controller="sample", seed=state, count=2)
    for state in range(6)
]


@pytest.fixture(scope="module", autouse=True)
def cluster(shared_ray: None) -> None:
    ray.cloudpickle.register_pickle_by_value(faulty)  # workers cannot import the tests


def ray_pool(make_fleet: MakeFleet) -> RayPool:
    return RayPool(2, ENV, make_fleet=make_fleet, timeout=TIMEOUT)


def local_pool(make_fleet: MakeFleet) -> LocalPool:
    return LocalPool(ENV, make_fleet=make_fleet)


def played(pool: Pool) -> list[list[Trajectory]]:
    results = dict(pool.run(REQUESTS, POLICY))
    return [results[index] for index in range(len(REQUESTS))]


def same(one: list[Trajectory], other: list[Trajectory]) -> bool:
    return all(np.array_equal(a.actions, b.actions) and a.valid and b.valid for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def undisturbed() -> list[list[Trajectory]]:
    return played(LocalPool(ENV))


def test_a_simulator_that_segfaults_hangs_or_raises_once_changes_nothing(
    tmp_path: Path, undisturbed: list[list[Trajectory]]
) -> None:
    kinds = (faulty.segfault, faulty.hang, faulty.hang_with_the_gil, faulty.raise_something)
    for state in range(len(kinds)):
        (tmp_path / str(state)).touch()
    results = played(ray_pool(Faulty(dict(enumerate(kinds)), once=tmp_path)))
    assert not list(tmp_path.iterdir()), "a simulator did not fail"
    assert all(same(one, other) for one, other in zip(results, undisturbed, strict=True))


@pytest.mark.parametrize(
    ("pool", "fail"),
    [
        (local_pool, faulty.raise_something),
        pytest.param(ray_pool, faulty.segfault, marks=pytest.mark.slow),
        pytest.param(ray_pool, faulty.raise_something, marks=pytest.mark.slow),
        pytest.param(ray_pool, faulty.hang, marks=pytest.mark.slow),
    ],
)
def test_an_init_state_that_always_fails_is_invalid_and_the_rest_is_played(
    pool: Callable[[Faulty], Pool], fail: Callable[[], None], undisturbed: list[list[Trajectory]]
) -> None:
    results = played(pool(Faulty({1: fail})))
    lost = results.pop(1)
    assert [(t.request, t.member) for t in lost] == [(REQUESTS[1], 0), (REQUESTS[1], 1)]
    assert not any(t.valid or t.success or t.length for t in lost)
    assert all(same(one, other) for one, other in zip(results, [undisturbed[0], *undisturbed[2:]], strict=True))


def test_a_simulator_that_raises_the_same_error_twice_is_not_played_a_third_time() -> None:
    failures = []

    def fail() -> None:
        failures.append(1)
        faulty.raise_something()

    assert not any(episode.valid for episode in played(local_pool(Faulty({1: fail})))[1])
    assert len(failures) == 2


@pytest.mark.parametrize(
    ("pool", "remedy"),
    [
        pytest.param(ray_pool, "set machine.workers to 0", marks=pytest.mark.slow),
        (local_pool, "nightshift env check says what is missing"),
    ],
)
def test_a_simulator_that_fails_everywhere_ends_the_run_with_one_sentence(
    pool: Callable[[Faulty], Pool], remedy: str
) -> None:
    with pytest.raises(RolloutError, match=r"failed on 3 of 6 init states.*near, state \d: MemoryError") as caught:
        played(pool(Faulty(dict.fromkeys(range(6), faulty.raise_something))))
    assert remedy in caught.value.next_step
