import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nightshift.data import episode as episodes
from nightshift.data.episode import NO_POLICY, Episode
from nightshift.errors import StreamError
from nightshift.stream.link import LinkDown, LocalLink
from nightshift.stream.message import Ack, Message
from nightshift.stream.sender import Sender
from nightshift.stream.spool import SpoolLimits
from nightshift.stream.weights import Weights
from tests.data.examples import make
from tests.stream.parts import contents, open_endpoint, open_spool
from tests.waiting import wait_until


class Switch(LocalLink):
    """A link that can be cut."""

    up = True

    def send(self, messages: Iterable[Message]) -> Iterator[Ack]:
        for ack in super().send(messages):
            if not self.up:
                raise LinkDown("the cable is out")
            yield ack

    def weights(self, newer_than: int) -> Weights | None:
        if not self.up:
            raise LinkDown("the cable is out")
        return super().weights(newer_than)


def wait_for_version(sender: Sender, version: int) -> None:
    waited = threading.Event()
    while sender.version < version:
        waited.wait(0.01)


def test_everything_that_is_put_arrives_once_and_in_order(tmp_path: Path) -> None:
    endpoint, spool = open_endpoint(tmp_path), open_spool(tmp_path / "spool")
    sender = Sender(spool, LocalLink(endpoint))
    made = [spool.put(make(seed=seed)) for seed in range(40)]
    spool.wait_until_empty(timeout=30)
    sender.close()
    assert [stored.header.episode_id for stored in endpoint.inbox.stored_after(0)] == made
    assert spool.metrics()["stream/acknowledged"] == spool.metrics()["stream/inserted"] == 40


def test_while_the_link_is_down_the_spool_fills_and_put_says_why(tmp_path: Path) -> None:
    endpoint = open_endpoint(tmp_path)
    spool = open_spool(tmp_path / "spool", limits=SpoolLimits(max_episodes=3, timeout=0.2))
    link = Switch(endpoint)
    link.up = False
    sender = Sender(spool, link)
    made = [spool.put(make(seed=seed)) for seed in range(3)]
    wait_until(lambda: spool.metrics()["stream/link_failures"])
    with pytest.raises(StreamError, match=r"is full.*the cable is out"):
        spool.put(make(seed=3))
    with pytest.raises(StreamError, match=r"3 episodes are still in.*the cable is out"):
        spool.wait_until_empty(timeout=0)
    link.up = True
    spool.wait_until_empty(timeout=30)
    sender.close()
    assert set(contents(endpoint.inbox)) == set(made)
    metrics = spool.metrics()
    assert metrics["stream/link_failures"] >= 1
    assert metrics["stream/duplicates"] == 1  # stored, but its ack was lost with the cable


def test_episodes_that_one_sender_did_not_deliver_are_sent_by_the_next(tmp_path: Path) -> None:
    endpoint, spool = open_endpoint(tmp_path), open_spool(tmp_path / "spool")
    link = Switch(endpoint)
    link.up = False
    sender = Sender(spool, link)
    made = [spool.put(make(seed=seed)) for seed in range(5)]
    sender.close()
    spool.close()
    link.up = True
    again = open_spool(tmp_path / "spool")
    sender = Sender(again, link)
    again.wait_until_empty(timeout=30)
    sender.close()
    assert set(contents(endpoint.inbox)) == set(made)


def test_one_bad_episode_does_not_stop_those_behind_it(tmp_path: Path) -> None:
    endpoint, spool = open_endpoint(tmp_path), open_spool(tmp_path / "spool")
    made = [spool.put(make(seed=seed)) for seed in range(5)]
    damaged = next(path for path in (tmp_path / "spool" / "waiting").glob(f"{made[2].key}.*"))
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    sender = Sender(spool, LocalLink(endpoint))
    spool.wait_until_empty(timeout=30)
    sender.close()
    assert set(contents(endpoint.inbox)) == {*made} - {made[2]}
    assert spool.metrics()["stream/rejected"] == 1
    assert (tmp_path / "spool" / "rejected" / damaged.name).read_bytes() == content


def test_put_raises_the_unexpected_error_that_stopped_the_sender(tmp_path: Path) -> None:
    endpoint, spool = open_endpoint(tmp_path), open_spool(tmp_path / "spool")
    spool.put(make())
    next((tmp_path / "spool" / "waiting").glob("*.safetensors")).unlink()
    sender = Sender(spool, LocalLink(endpoint))
    with pytest.raises(StreamError, match=r"the sender of .* stopped: FileNotFoundError"):
        spool.wait_until_empty()
    with pytest.raises(StreamError, match="FileNotFoundError"):
        spool.put(make())
    sender.close()


def test_an_actor_fetches_the_latest_weights_and_skips_older_versions(tmp_path: Path) -> None:
    endpoint, spool = open_endpoint(tmp_path), open_spool(tmp_path / "spool")
    link = Switch(endpoint)
    endpoint.publisher.publish({"w": np.zeros(3, np.float32)})
    sender = Sender(spool, link, poll_interval=0.01)
    wait_for_version(sender, 0)
    link.up = False
    for value in range(1, 21):
        endpoint.publisher.publish({"w": np.full(3, value, np.float32)})
    link.up = True
    wait_for_version(sender, 20)
    sender.close()
    assert sender.latest_weights is not None
    np.testing.assert_array_equal(sender.latest_weights.arrays()["w"], np.full(3, 20, np.float32))


def play(sender: Sender, steps: int, learn: threading.Event) -> Episode:
    """An actor that reads the latest weights at every step; its actions show which version it had."""
    versions, actions = np.full(steps, NO_POLICY, np.int64), np.zeros((steps, 7), np.float32)
    for step in range(steps):
        weights = sender.latest_weights
        if weights is not None:
            versions[step], actions[step] = weights.version, weights.arrays()["w"]
        if step % 5 == 4:
            newer = sender.version + 1  # before the learner makes it
            learn.set()
            wait_for_version(sender, newer)
    return replace(make(steps=steps), actions=actions, policy_actions=actions, policy_versions=versions)


def test_every_step_records_the_version_that_acted(tmp_path: Path) -> None:
    endpoint, spool = open_endpoint(tmp_path), open_spool(tmp_path / "spool")
    sender = Sender(spool, LocalLink(endpoint), poll_interval=0.005)
    learn, stop = threading.Event(), threading.Event()

    def learner() -> None:
        while not stop.is_set():
            if learn.wait(0.01):
                learn.clear()
                endpoint.publisher.publish({"w": np.full(7, (endpoint.publisher.version + 1) / 8, np.float32)})

    thread = threading.Thread(target=learner)
    thread.start()
    spool.put(play(sender, 21, learn))
    spool.wait_until_empty(timeout=30)
    stop.set()
    thread.join()
    sender.close()
    stored = endpoint.inbox.stored_after(0)[0].load()
    assert stored.policy_versions.tolist() == [NO_POLICY] * 5 + [0] * 5 + [1] * 5 + [2] * 5 + [3]
    acted = stored.policy_versions != NO_POLICY
    np.testing.assert_array_equal(stored.actions[acted, 0], stored.policy_versions[acted] / 8)
    assert episodes.to_bytes(stored) == endpoint.inbox.stored_after(0)[0].path.read_bytes()
