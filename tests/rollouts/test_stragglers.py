"""A worker that crawls: what it plays is played a second time, and whoever is first counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from nightshift.rollouts.local import LocalPool
from nightshift.rollouts.pool import RayPool
from nightshift.rollouts.stragglers import Pace
from nightshift.types import Trajectory
from tests.rollouts import faulty
from tests.rollouts.faulty import Faulty, Slow
from tests.rollouts.test_pool import ENV, POLICY, actions, requests, same

WANTED = [request for request in requests(4) if request.task == "near"]
FIRST_TWO = dict.fromkeys((0, 1), faulty.segfault)
GRACE = 1.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One Ray for all of these tests; a pool that finds Ray started uses it."""
    ray.cloudpickle.register_pickle_by_value(faulty)  # workers cannot import the tests
    RayPool(2, ENV)
    yield
    ray.shutdown()


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


def test_what_a_crawling_worker_plays_is_played_by_another_too_and_nothing_changes(
    slow: Path, undisturbed: dict[int, list[Trajectory]]
) -> None:
    """The slow one alone would need minutes for its first request."""
    pool = RayPool(2, ENV, make_fleet=Slow(slow, Faulty({})), grace=GRACE)
    results = played(pool)
    assert not slow.exists(), "no worker was slow, or it was waited for"
    assert same(actions(results), actions(undisturbed))
    assert same(actions(played(pool)), actions(undisturbed)), "and the pool goes on working"


def test_where_the_second_player_dies_the_first_goes_on_and_a_third_may_be_faster(
    tmp_path: Path, slow: Path, undisturbed: dict[int, list[Trajectory]]
) -> None:
    """The slow worker gets the first request or the second: each is spoilt for the first of the others."""
    strikes = tmp_path / "strikes"
    strikes.mkdir()
    for state in FIRST_TWO:
        (strikes / str(state)).touch()
    results = played(RayPool(2, ENV, make_fleet=Slow(slow, Faulty(FIRST_TWO, once=strikes)), grace=GRACE))
    assert not slow.exists(), "no worker was slow"
    assert not list(strikes.iterdir()), "a second player did not die"
    assert same(actions(results), actions(undisturbed))


def test_nothing_is_late_before_anything_was_answered() -> None:
    assert Pace(grace=1).late([(0, 1e6)]) is None


def test_late_is_what_takes_three_times_as_long_as_others_took() -> None:
    pace = Pace(grace=5)
    for seconds in (9, 10, 500):
        pace.took(seconds)
    assert pace.late([(0, 29.0), (1, 1.0)]) is None
    assert pace.late([(0, 31.0), (1, 1.0)]) == 0
    assert pace.late([(0, 31.0), (1, 32.0)]) == 1


def test_what_is_short_is_not_late_before_the_grace_is_over() -> None:
    pace = Pace(grace=5)
    pace.took(0.1)
    assert pace.late([(0, 4.0)]) is None
    assert pace.late([(0, 6.0)]) == 0


def test_nothing_is_played_by_three() -> None:
    pace = Pace(grace=1)
    pace.took(1)
    assert pace.late([(0, 90.0), (0, 30.0)]) is None
    assert pace.late([(0, 90.0), (0, 30.0), (1, 10.0)]) == 1
