"""Ray workers that play several requests at once: the same episodes, and a process that dies costs only its request."""

from __future__ import annotations

from dataclasses import replace

import pytest
import ray
import torch

from nightshift.rollouts.engine import EngineSettings
from nightshift.rollouts.local import LocalPool
from nightshift.rollouts.pool import RayPool
from tests.rollouts import faulty
from tests.rollouts.faulty import Faulty
from tests.rollouts.parts import assert_same
from tests.rollouts.test_pool import ENV, POLICY, requests

THREE_AT_ONCE = EngineSettings(device=torch.device("cpu"), threads=1, requests_at_once=3)


@pytest.fixture(scope="module", autouse=True)
def cluster(shared_ray: None) -> None:
    ray.cloudpickle.register_pickle_by_value(faulty)  # workers cannot import the tests


def test_workers_that_play_several_requests_at_once_play_the_same_episodes() -> None:
    here = dict(LocalPool(ENV).run(requests(4), POLICY))
    there = dict(RayPool(1, ENV, THREE_AT_ONCE).run(requests(4), POLICY))
    assert sorted(there) == sorted(here)
    for index, group in here.items():
        for one, other in zip(group, there[index], strict=True):
            assert_same(one, other)


def test_of_requests_that_are_played_at_once_only_the_one_that_ends_its_process_is_lost() -> None:
    wanted = [replace(one, controller="greedy", count=1) for one in requests(4) if one.task == "near"]
    here = dict(LocalPool(ENV).run(wanted, POLICY))
    there = dict(RayPool(1, ENV, THREE_AT_ONCE, make_fleet=Faulty({1: faulty.segfault})).run(wanted, POLICY))
    assert [there[index][0].valid for index in range(4)] == [True, False, True, True]
    for index in (0, 2, 3):
        assert_same(here[index][0], there[index][0])
