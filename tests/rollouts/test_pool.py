import multiprocessing
import os
import signal
from collections.abc import Container, Iterator
from typing import Any

import numpy as np
import pytest
import ray
import torch

from nightshift import config
from nightshift.errors import SimulatorError
from nightshift.policies.gaussian_mlp import GaussianMlp
from nightshift.policies.snapshot import PolicySnapshot, snapshot
from nightshift.rollouts.local import LocalPool
from nightshift.rollouts.pool import RayPool
from nightshift.types import RolloutRequest, Trajectory
from tests.rollouts.parts import NO_CAMERAS
from tests.waiting import wait_until

ENV = config.Env(suite="fake", tasks=(), protocol="openvla-oft", horizon=12, cameras=NO_CAMERAS)
POLICY = snapshot(GaussianMlp(inputs={"objects": 3, "task": 2}, hidden=[8], chunk=1, action_dim=7))


def requests(count: int) -> list[RolloutRequest]:
    return [
        RolloutRequest(task=task, split="train", init_state=i, controller="sample", seed=i, count=3)
        for i in range(count)
        for task in ("near", "far")
    ]


def actions(results: dict[int, list[Trajectory]]) -> list[Any]:
    return [np.concatenate([t.actions for t in results[index]]) for index in sorted(results)]


@pytest.fixture(scope="module")
def pool(shared_ray: None) -> Iterator[RayPool]:
    pool = RayPool(2, ENV)
    yield pool
    pool.close()


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_ray_and_this_process_play_the_same_episodes(pool: RayPool) -> None:
    here = dict(LocalPool(ENV).run(requests(5), POLICY))
    assert same(actions(dict(pool.run(requests(5), POLICY))), actions(here))


def test_no_requests_are_no_episodes(pool: RayPool) -> None:
    assert list(pool.run([], POLICY)) == []


def test_weights_arrive_in_their_own_dtype_without_a_copy(pool: RayPool) -> None:
    wide = GaussianMlp(inputs={"objects": 3, "task": 2}, hidden=[256], chunk=1, action_dim=7).bfloat16()
    sent = ray.put(snapshot(wide))
    first, second = ray.get(sent), ray.get(sent)
    name = "net.0.weight"
    assert first.tensors()[name].dtype == torch.bfloat16
    assert torch.equal(first.tensors()[name], wide.state_dict()[name])
    assert np.shares_memory(first.weights[name], second.weights[name])


def test_a_killed_worker_is_replaced_and_nothing_is_lost_or_changed(pool: RayPool) -> None:
    wanted = requests(20)
    results: dict[int, list[Trajectory]] = {}
    for index, trajectories in pool.run(wanted, POLICY):
        if len(results) == 3:
            os.kill(worker_pids()[0], signal.SIGKILL)
        assert index not in results
        results[index] = trajectories
    assert same(actions(results), actions(dict(LocalPool(ENV).run(wanted, POLICY))))


def test_seconds_that_were_told_stay_told_when_their_worker_dies(pool: RayPool) -> None:
    list(pool.run(requests(2), POLICY))
    before = pool.spent()
    assert set(before) == {"busy", "simulation", "look", "inference", "transfer"}
    assert all(seconds > 0 for seconds in before.values())
    for pid in worker_pids():
        os.kill(pid, signal.SIGKILL)
    list(pool.run(requests(2), POLICY))
    assert all(pool.spent()[name] > seconds for name, seconds in before.items())


def test_weights_are_put_once_per_policy_and_let_go_with_the_next(
    pool: RayPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, references = ray.put, []

    def counting(value: Any) -> Any:
        reference = put(value)
        references.append(reference.hex())
        return reference

    monkeypatch.setattr(ray, "put", counting)
    for policy in (fresh_policy(), fresh_policy()):
        for _ in range(2):
            list(pool.run(requests(1), policy))
    first, second = references
    assert second in held()
    wait_until(lambda: first not in held())  # workers let go of what they borrowed a little later than they answer


def fresh_policy() -> PolicySnapshot:
    return snapshot(GaussianMlp(inputs={"objects": 3, "task": 2}, hidden=[8], chunk=1, action_dim=7))


def held() -> set[str]:
    """Objects that this process keeps alive, for itself or for others."""
    counts: dict[bytes, Any] = ray._private.worker.global_worker.core_worker.get_all_reference_counts()
    return {reference.decode() for reference in counts}


def test_an_error_in_a_worker_arrives_as_it_was_raised(pool: RayPool) -> None:
    unknown = RolloutRequest(task="nowhere", split="train", init_state=0, controller="sample", seed=0)
    with pytest.raises(SimulatorError, match="no task 'nowhere' here; there are near, far"):
        list(pool.run([unknown], POLICY))


def test_a_pool_that_was_left_early_goes_on_working(pool: RayPool) -> None:
    next(iter(pool.run(requests(5), POLICY)))
    assert len(dict(pool.run(requests(2), POLICY))) == 4


def worker_pids() -> list[int]:
    """Processes of this test's Ray workers: they descend from this process, or from one that it has had forked
    (ray_cluster.py) and that is no child of it."""
    mine = {os.getpid(), *(process.pid for process in multiprocessing.active_children())}
    pids = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and b"ray::Worker" in _read(f"/proc/{entry}/cmdline") and _descends(int(entry), mine):
            pids.append(int(entry))
    return pids


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except OSError:
        return b""


def _descends(pid: int, ancestors: Container[int | None]) -> bool:
    while pid > 1:
        if pid in ancestors:
            return True
        status = _read(f"/proc/{pid}/stat")
        pid = int(status.rsplit(b")", 1)[1].split()[1]) if status else 0
    return False
