"""What ranks ask of a Ray cluster with GPUs, on one whose GPUs are only counted."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest
import ray
import torch
from ray.exceptions import RayError

from nightshift import config
from nightshift.errors import DeviceError
from nightshift.learners.ranks import RayLearners
from nightshift.rollouts.engine import EngineSettings
from nightshift.rollouts.pool import RayPool
from tests.learners.test_ranks import spec
from tests.rollouts.parts import NO_CAMERAS

GPUS = 2
ON_GPU = replace(spec(), device=torch.device("cuda"))


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    ray.init("local", num_cpus=1, num_gpus=GPUS, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()
    for number, handler in handlers.items():  # Ray replaces them
        signal.signal(number, handler)


def test_more_ranks_than_gpus_are_refused_before_any_work() -> None:
    with pytest.raises(DeviceError, match=r"machine\.ranks is 3, one GPU each, and the Ray cluster has 2"):
        RayLearners(ON_GPU, GPUS + 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks would really learn there")
def test_every_rank_has_a_gpu_of_its_own() -> None:
    learners = RayLearners(ON_GPU, GPUS)
    with pytest.raises(RayError):  # from `join`: torch finds no GPU here
        learners._start_ranks()
    given = ray.get([rank.__ray_call__.remote(lambda _: ray.get_gpu_ids()) for rank in learners._ranks])
    assert sorted(given) == [[0], [1]]
    learners.close()


def test_workers_are_refused_where_the_ranks_take_all_gpus() -> None:
    env = config.Env(suite="fake", tasks=(), protocol="openvla-oft", horizon=6, cameras=NO_CAMERAS)
    settings = EngineSettings(device=torch.device("cuda"), threads=1, requests_at_once=1, reserved_gpus=GPUS)
    with pytest.raises(DeviceError, match=r"2 for the learner's ranks \(machine\.ranks\): none is left for workers"):
        RayPool(1, env, settings)
