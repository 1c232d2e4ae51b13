"""A slow worker: what it plays is played a second time, and the first answer counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from nightshift.rollouts.local import LocalPool
from nightshift.rollouts.pool import RayPool
from nightshift.rollouts.stragglers import StragglerDetector
from nightshift.types import Trajectory
from tests.rollouts import faulty
from tests.rollouts.faulty import Faulty, Slow
from tests.rollouts.test_pool import ENV, POLICY, actions, requests, same

WANTED = [request for request in requests(4) if request.task == "near"]
FIRST_TWO = dict.fromkeys((0, 1), faulty.segfault)
GRACE = 1.0


@pytest.fixture(scope="module")
def cluster(shared_ray: None) -> None:
    ray.cloudpickle.register_pickle_by_value(faulty)  # workers cannot import the tests


def played(pool: RayPool) -> dict[int, list[Trajectory]]:
    results: dict[int, list[Trajectory]] = {}
    for index, trajectories in pool.run(WANTED, POLICY):
        assert index not in results, "yielded twice"
        results[index] = trajectories
    return results


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, list[Trajectory]]:
    return dict(LocalPool(ENV).run(WANTED, POLICY))


@pytest.fixture
def slow(cluster: None, tmp_path: Path) -> Path:
    """There until a worker is slow."""
    path = tmp_path / "slow"
    path.touch()
    return path


def test_what_a_slow_worker_plays_is_played_by_another_too_and_nothing_changes(
    slow: Path, undisturbed: dict[int, list[Trajectory]]
) -> None:
    """The slow one alone would need minutes for its first request."""
    pool = RayPool(2, ENV, make_fleet=Slow(slow, Faulty({})), grace=GRACE)
    results = played(pool)
    assert not slow.exists(), "no worker was slow, or it was waited for"
    assert same(actions(results), actions(undisturbed))
    assert same(actions(played(pool)), actions(undisturbed)), "and the pool goes on working"


def test_where_the_second_worker_dies_the_first_goes_on_and_a_third_may_be_faster(
    tmp_path: Path, slow: Path, undisturbed: dict[int, list[Trajectory]]
) -> None:
    """The slow worker gets the first request or the second: each is spoilt for the first of the others."""
    strikes = tmp_path / "strikes"
    strikes.mkdir()
    for state in FIRST_TWO:
        (strikes / str(state)).touch()
    results = played(RayPool(2, ENV, make_fleet=Slow(slow, Faulty(FIRST_TWO, once=strikes)), grace=GRACE))
    assert not slow.exists(), "no worker was slow"
    assert not list(strikes.iterdir()), "a second worker did not die"
    assert same(actions(results), actions(undisturbed))


def test_nothing_is_a_straggler_before_any_request_finished() -> None:
    assert StragglerDetector(grace=1).slowest([((0,), 1e6)]) is None


def test_a_straggler_takes_three_times_as_long_as_the_median() -> None:
    detector = StragglerDetector(grace=5)
    for seconds in (9, 10, 500):
        detector.record(seconds)
    assert detector.slowest([((0,), 29.0), ((1,), 1.0)]) is None
    assert detector.slowest([((0,), 31.0), ((1,), 1.0)]) == (0,)
    assert detector.slowest([((0,), 31.0), ((1,), 32.0)]) == (1,)


def test_a_short_request_is_no_straggler_within_the_grace_time() -> None:
    detector = StragglerDetector(grace=5)
    detector.record(0.1)
    assert detector.slowest([((0,), 4.0)]) is None
    assert detector.slowest([((0,), 6.0)]) == (0,)


def test_no_request_is_played_by_three_workers() -> None:
    detector = StragglerDetector(grace=1)
    detector.record(1)
    assert detector.slowest([((0, 1), 90.0), ((0, 1), 30.0)]) is None
    assert detector.slowest([((0, 1), 90.0), ((0, 1), 30.0), ((2, 3), 10.0)]) == (2, 3)
