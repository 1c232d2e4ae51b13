"""Several ranks on a real Ray give the update that one process gives."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import ray

from nightshift.distributed.learners import Learned, RayLearners, Single, Start, open_learners
from nightshift.distributed.worker import snapshot
from tests.algorithms.test_on_policy import MIXED, groups, policy, settings


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    yield
    ray.shutdown()


def start(ranks: int, **changes: Any) -> Start:
    chosen = settings(ranks=ranks, **changes)
    return Start(policy=snapshot(policy()), settings=chosen, seed=0, demos=None)


def parts(ranks: int) -> list[Any]:
    """The same groups in the same order, dealt out in runs; the last rank may get none."""
    played = groups(policy(), *MIXED)
    bounds = {1: [0, 3], 2: [0, 2, 3], 3: [0, 1, 3, 3]}[ranks]
    return [played[a:b] for a, b in pairwise(bounds)]


def trained(ranks: int, **changes: Any) -> Learned:
    learners = open_learners(start(ranks, **changes))
    for time in range(2):
        learners.update(parts(ranks), time / 2)
    learned = learners.learned()
    learners.close()
    return learned


def assert_close(together: Learned, alone: Learned) -> None:
    for name, expected in alone.tensors.items():
        np.testing.assert_allclose(together.tensors[name], expected, atol=2e-6, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize(("ranks", "advantage"), [(2, "rloo"), (3, "gae")])
def test_any_number_of_ranks_makes_the_update_of_one(ranks: int, advantage: str) -> None:
    assert_close(trained(ranks, advantage=advantage), trained(1, advantage=advantage))


@pytest.mark.slow
@pytest.mark.parametrize("advantage", ["rloo", "rloo_batch", "grpo", "reinforce++", "gae"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_any_number_of_ranks_makes_the_update_of_one_whatever_the_advantage(ranks: int, advantage: str) -> None:
    assert_close(trained(ranks, advantage=advantage), trained(1, advantage=advantage))


def test_a_rank_that_is_killed_is_replaced_and_the_update_is_the_same() -> None:
    expected = trained(2)
    learners = RayLearners(start(2))
    learners.update(parts(2), 0.0)
    ray.kill(learners._ranks[1])
    learners.update(parts(2), 0.5)
    for name, values in learners.learned().tensors.items():
        np.testing.assert_array_equal(values, expected.tensors[name], err_msg=name)
    learners.close()


def test_restored_learners_go_on_where_they_were() -> None:
    first = Single(start(1, advantage="gae"))
    first.update(parts(1), 0.0)
    middle = first.learned()
    first.update(parts(1), 0.5)
    second = Single(start(1, advantage="gae"))
    second.restore(middle)
    second.update(parts(1), 0.5)
    for name, values in first.learned().tensors.items():
        np.testing.assert_array_equal(second.learned().tensors[name], values, err_msg=name)
