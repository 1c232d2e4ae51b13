import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from nightshift.cluster.connection import start_ray
from nightshift.stream import on_ray
from nightshift.stream.identity import Identity
from nightshift.stream.link import LinkDown
from nightshift.stream.on_ray import RayDesk, RayLink
from nightshift.stream.sender import Courier
from tests.data.examples import make
from tests.stream.parts import RUN, identity, open_spool, parcel, parcel_of


class Mortal(RayDesk):
    def pid(self) -> int:
        return os.getpid()


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    start_ray(2)
    yield
    ray.shutdown()


@pytest.fixture
def desk(cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(on_ray, "RayDesk", Mortal)
    desk = on_ray.open_desk(tmp_path / "learner", RUN)
    yield desk
    ray.kill(desk)


def test_several_actors_deliver_over_ray_while_the_desk_is_killed_and_nothing_is_lost_or_doubled(
    desk: Any, tmp_path: Path
) -> None:
    spools = [open_spool(tmp_path / name, name) for name in ("left", "right")]
    couriers = [Courier(spool, RayLink(desk), longest_pause=0.2) for spool in spools]
    first = ray.get(desk.pid.remote())
    made: list[Identity] = []
    for seed in range(20):
        made.extend(spool.put(make(seed=seed)) for spool in spools)
        if seed == 10:
            os.kill(first, signal.SIGKILL)
    for spool, courier in zip(spools, couriers, strict=True):
        spool.await_empty(timeout=120)
        courier.close()
    arrivals = ray.get(desk.since.remote(0))
    assert ray.get(desk.pid.remote()) != first
    assert sorted(arrival.label.identity for arrival in arrivals) == sorted(made)
    assert ray.get(desk.since.remote(arrivals[-2].position)) == arrivals[-1:]
    assert all(arrival.load().provenance.origin == arrival.label.identity.key for arrival in arrivals)


def test_outcomes_and_weights_travel_over_ray_and_the_version_goes_on_after_a_restart(desk: Any) -> None:
    link = RayLink(desk)
    good, bad = parcel(identity(0)), parcel_of(identity(1), b"garbage" * 9)
    assert [r.outcome for r in link.send([good, bad, good])] == ["accepted", "rejected", "duplicate"]
    assert link.weights(-1) is None
    for value in range(3):
        ray.get(desk.publish.remote({"w": np.full(2, value, np.float32)}))
    os.kill(ray.get(desk.pid.remote()), signal.SIGKILL)
    weights = None
    while weights is None:
        try:
            weights = link.weights(-1)
        except LinkDown:
            continue
    assert weights.version == 2
    np.testing.assert_array_equal(weights.arrays()["w"], [2, 2])
    assert ray.get(desk.publish.remote({"w": np.zeros(2, np.float32)})) == 3
    with pytest.raises(LinkDown, match="an actor has weights of version 9"):
        link.weights(9)
    link.close()
