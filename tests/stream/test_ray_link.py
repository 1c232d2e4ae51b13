import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from nightshift.cluster.connection import start_ray
from nightshift.stream import ray_link
from nightshift.stream.episode_id import EpisodeId
from nightshift.stream.link import LinkDown
from nightshift.stream.ray_link import RayLearnerEndpoint, RayLink
from nightshift.stream.sender import Sender
from tests.data.examples import make
from tests.stream.parts import RUN, episode_id, message, message_of, open_spool


class Mortal(RayLearnerEndpoint):
    def pid(self) -> int:
        return os.getpid()


@pytest.fixture(scope="module")
def cluster(shared_ray: None) -> None:
    start_ray(2)


@pytest.fixture
def endpoint(cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(ray_link, "RayLearnerEndpoint", Mortal)
    endpoint = ray_link.start_endpoint(tmp_path / "learner", RUN)
    yield endpoint
    ray.kill(endpoint)


def test_several_actors_deliver_over_ray_while_the_endpoint_is_killed_and_nothing_is_lost_or_doubled(
    endpoint: Any, tmp_path: Path
) -> None:
    spools = [open_spool(tmp_path / name, name) for name in ("left", "right")]
    senders = [Sender(spool, RayLink(endpoint), max_backoff=0.2) for spool in spools]
    first = ray.get(endpoint.pid.remote())
    made: list[EpisodeId] = []
    for seed in range(20):
        made.extend(spool.put(make(seed=seed)) for spool in spools)
        if seed == 10:
            os.kill(first, signal.SIGKILL)
    for spool, sender in zip(spools, senders, strict=True):
        spool.wait_until_empty(timeout=120)
        sender.close()
    stored_episodes = ray.get(endpoint.stored_after.remote(0))
    assert ray.get(endpoint.pid.remote()) != first
    assert sorted(stored.header.episode_id for stored in stored_episodes) == sorted(made)
    assert ray.get(endpoint.stored_after.remote(stored_episodes[-2].position)) == stored_episodes[-1:]
    assert all(stored.load().provenance.origin == stored.header.episode_id.key for stored in stored_episodes)


def test_an_endpoint_whose_learner_does_not_read_defers_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process: the class is an ordinary one."""
    monkeypatch.setattr(ray_link, "MAX_UNREAD", 3)
    endpoint = RayLearnerEndpoint(tmp_path, RUN)
    sent = [message(episode_id(number)) for number in range(4)]
    outcomes = [endpoint.store(each.header, each.payload).outcome for each in sent]
    assert outcomes == ["accepted"] * 3 + ["deferred"]
    endpoint.stored_after(1)
    assert endpoint.store(sent[-1].header, sent[-1].payload).outcome == "accepted"


def test_outcomes_and_weights_travel_over_ray_and_the_version_goes_on_after_a_restart(endpoint: Any) -> None:
    link = RayLink(endpoint)
    good, bad = message(episode_id(0)), message_of(episode_id(1), b"garbage" * 9)
    assert [r.outcome for r in link.send([good, bad, good])] == ["accepted", "rejected", "duplicate"]
    assert link.weights(-1) is None
    for value in range(3):
        ray.get(endpoint.publish.remote({"w": np.full(2, value, np.float32)}))
    os.kill(ray.get(endpoint.pid.remote()), signal.SIGKILL)
    weights = None
    while weights is None:
        try:
            weights = link.weights(-1)
        except LinkDown:
            continue
    assert weights.version == 2
    np.testing.assert_array_equal(weights.arrays()["w"], [2, 2])
    assert ray.get(endpoint.publish.remote({"w": np.zeros(2, np.float32)})) == 3
    with pytest.raises(LinkDown, match="an actor has weights of version 9"):
        link.weights(9)
    link.close()
