"""What ranks and workers ask of a Ray cluster with GPUs, on one whose GPUs are only counted."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import ray
import torch
from ray.exceptions import RayError

from nightshift import config, envs
from nightshift.cluster.gpus import Gpu
from nightshift.errors import DeviceError
from nightshift.learners.ranks import RayLearners
from nightshift.rollouts.engine import EngineSettings
from nightshift.rollouts.pool import RayPool
from tests.learners.test_ranks import spec
from tests.rollouts.parts import NO_CAMERAS

GPUS = 2
ENV = config.Env(suite="fake", tasks=(), protocol="openvla-oft", horizon=6, cameras=NO_CAMERAS)
ON_GPU = replace(spec(), device=torch.device("cuda"))
SHARED = EngineSettings(device=torch.device("cuda"), threads=1, requests_at_once=1)


pytestmark = pytest.mark.usefixtures("shared_ray")


def test_more_ranks_than_gpus_are_refused_before_any_work() -> None:
    with pytest.raises(DeviceError, match=r"machine\.ranks is 3, one GPU each, and the Ray cluster has 2"):
        RayLearners(ON_GPU, GPUS + 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks would really learn there")
def test_every_rank_has_a_gpu_of_its_own() -> None:
    learners = RayLearners(ON_GPU, GPUS, placement="apart")
    with pytest.raises(RayError):  # from `join`: torch finds no GPU here
        learners._start_ranks()
    given = ray.get([rank.__ray_call__.remote(lambda _: ray.get_gpu_ids()) for rank in learners._ranks])
    assert sorted(given) == [[0], [1]]
    learners.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks would really learn there")
def test_colocated_ranks_see_one_gpu_each_while_workers_hold_all_of_them() -> None:
    pool = RayPool(GPUS, ENV, SHARED)
    workers = [pool._start_worker() for _ in range(GPUS)]
    held = ray.get([worker.__ray_call__.remote(lambda _: ray.get_gpu_ids()) for worker in workers])
    assert sorted(held) == [[0], [1]]
    learners = RayLearners(ON_GPU, GPUS)
    with pytest.raises(RayError):
        learners._start_ranks()
    seen = [rank.__ray_call__.remote(lambda _: os.environ["CUDA_VISIBLE_DEVICES"]) for rank in learners._ranks]
    assert ray.get(seen) == ["0", "1"]
    learners.close()
    for worker in workers:
        ray.kill(worker)


def test_a_gpu_is_one_of_those_that_its_node_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    Gpu("node", 1).choose()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "6"


def test_every_worker_draws_on_the_gpu_that_it_acts_on() -> None:
    pool = RayPool(GPUS, ENV, SHARED)
    workers = [pool._start_worker() for _ in range(GPUS)]
    drawing = [worker.__ray_call__.remote(lambda _: os.environ["MUJOCO_EGL_DEVICE_ID"]) for worker in workers]
    assert sorted(ray.get(drawing)) == ["0", "1"]
    for worker in workers:
        ray.kill(worker)


def test_a_choice_of_the_user_where_to_draw_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", "3")
    envs.draw_on_gpu(1)
    assert os.environ["MUJOCO_EGL_DEVICE_ID"] == "3"


def test_workers_are_refused_where_the_ranks_take_all_gpus() -> None:
    settings = replace(SHARED, reserved_gpus=GPUS)
    with pytest.raises(DeviceError, match=r"2 for the learner's ranks \(machine\.ranks\): none is left for workers"):
        RayPool(1, ENV, settings)
