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
from nightshift.stream.message import Parcel, Receipt
from nightshift.stream.sender import Courier
from nightshift.stream.spool import Room
from nightshift.stream.weights import Weights
from tests.data.examples import make
from tests.stream.parts import contents, open_desk, open_spool


class Switch(LocalLink):
    """A link that can be cut."""

    up = True

    def send(self, parcels: Iterable[Parcel]) -> Iterator[Receipt]:
        for receipt in super().send(parcels):
            if not self.up:
                raise LinkDown("the cable is out")
            yield receipt

    def weights(self, newer_than: int) -> Weights | None:
        if not self.up:
            raise LinkDown("the cable is out")
        return super().weights(newer_than)


def await_version(courier: Courier, version: int) -> None:
    waited = threading.Event()
    while courier.version < version:
        waited.wait(0.01)


def test_everything_that_is_put_arrives_once_and_in_order(tmp_path: Path) -> None:
    desk, spool = open_desk(tmp_path), open_spool(tmp_path / "spool")
    courier = Courier(spool, LocalLink(desk))
    made = [spool.put(make(seed=seed)) for seed in range(40)]
    spool.await_empty(timeout=30)
    courier.close()
    assert [arrival.label.identity for arrival in desk.inbox.since(0)] == made
    assert spool.metrics()["stream/acknowledged"] == spool.metrics()["stream/inserted"] == 40


def test_while_the_link_is_down_the_spool_fills_and_put_says_why(tmp_path: Path) -> None:
    desk = open_desk(tmp_path)
    spool = open_spool(tmp_path / "spool", room=Room(episodes=3, patience=0.2))
    link = Switch(desk)
    link.up = False
    courier = Courier(spool, link)
    made = [spool.put(make(seed=seed)) for seed in range(3)]
    with pytest.raises(StreamError, match=r"is full.*the cable is out"):
        spool.put(make(seed=3))
    with pytest.raises(StreamError, match=r"3 episodes still wait.*the cable is out"):
        spool.await_empty(timeout=0)
    link.up = True
    spool.await_empty(timeout=30)
    courier.close()
    assert set(contents(desk.inbox)) == set(made)
    metrics = spool.metrics()
    assert metrics["stream/link_failures"] >= 1
    assert metrics["stream/duplicates"] == 1  # stored, but its receipt was lost with the cable


def test_what_a_courier_did_not_deliver_goes_with_the_next_one(tmp_path: Path) -> None:
    desk, spool = open_desk(tmp_path), open_spool(tmp_path / "spool")
    link = Switch(desk)
    link.up = False
    courier = Courier(spool, link)
    made = [spool.put(make(seed=seed)) for seed in range(5)]
    courier.close()
    spool.close()
    link.up = True
    again = open_spool(tmp_path / "spool")
    courier = Courier(again, link)
    again.await_empty(timeout=30)
    courier.close()
    assert set(contents(desk.inbox)) == set(made)


def test_one_bad_episode_does_not_stop_those_behind_it(tmp_path: Path) -> None:
    desk, spool = open_desk(tmp_path), open_spool(tmp_path / "spool")
    made = [spool.put(make(seed=seed)) for seed in range(5)]
    damaged = next(path for path in (tmp_path / "spool" / "waiting").glob(f"{made[2].key}.*"))
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    courier = Courier(spool, LocalLink(desk))
    spool.await_empty(timeout=30)
    courier.close()
    assert set(contents(desk.inbox)) == {*made} - {made[2]}
    assert spool.metrics()["stream/rejected"] == 1
    assert (tmp_path / "spool" / "rejected" / damaged.name).read_bytes() == content


def test_an_error_nobody_thought_of_is_raised_by_put(tmp_path: Path) -> None:
    desk, spool = open_desk(tmp_path), open_spool(tmp_path / "spool")
    spool.put(make())
    next((tmp_path / "spool" / "waiting").glob("*.safetensors")).unlink()
    courier = Courier(spool, LocalLink(desk))
    with pytest.raises(StreamError, match=r"the courier of .* stopped: FileNotFoundError"):
        spool.await_empty()
    with pytest.raises(StreamError, match="FileNotFoundError"):
        spool.put(make())
    courier.close()


def test_an_actor_takes_the_newest_weights_and_none_between(tmp_path: Path) -> None:
    desk, spool = open_desk(tmp_path), open_spool(tmp_path / "spool")
    link = Switch(desk)
    desk.publisher.publish({"w": np.zeros(3, np.float32)})
    courier = Courier(spool, link, ask_every=0.01)
    await_version(courier, 0)
    link.up = False
    for value in range(1, 21):
        desk.publisher.publish({"w": np.full(3, value, np.float32)})
    link.up = True
    await_version(courier, 20)
    courier.close()
    assert courier.newest is not None
    np.testing.assert_array_equal(courier.newest.arrays()["w"], np.full(3, 20, np.float32))


def play(courier: Courier, steps: int, learn: threading.Event) -> Episode:
    """An actor that asks for the newest weights at every step; its actions show which ones it had."""
    versions, actions = np.full(steps, NO_POLICY, np.int64), np.zeros((steps, 7), np.float32)
    for step in range(steps):
        weights = courier.newest
        if weights is not None:
            versions[step], actions[step] = weights.version, weights.arrays()["w"]
        if step % 5 == 4:
            learn.set()
            await_version(courier, courier.version + 1)
    return replace(make(steps=steps), actions=actions, policy_actions=actions, policy_versions=versions)


def test_every_step_records_the_version_that_acted(tmp_path: Path) -> None:
    desk, spool = open_desk(tmp_path), open_spool(tmp_path / "spool")
    courier = Courier(spool, LocalLink(desk), ask_every=0.005)
    learn, stop = threading.Event(), threading.Event()

    def learner() -> None:
        while not stop.is_set():
            if learn.wait(0.01):
                learn.clear()
                desk.publisher.publish({"w": np.full(7, (desk.publisher.version + 1) / 8, np.float32)})

    thread = threading.Thread(target=learner)
    thread.start()
    spool.put(play(courier, 21, learn))
    spool.await_empty(timeout=30)
    stop.set()
    thread.join()
    courier.close()
    stored = desk.inbox.since(0)[0].load()
    assert stored.policy_versions.tolist() == [NO_POLICY] * 5 + [0] * 5 + [1] * 5 + [2] * 5 + [3]
    acted = stored.policy_versions != NO_POLICY
    np.testing.assert_array_equal(stored.actions[acted, 0], stored.policy_versions[acted] / 8)
    assert episodes.to_bytes(stored) == desk.inbox.since(0)[0].path.read_bytes()
