from __future__ import annotations

import contextlib
import gc
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightshift.data.mixer import Mixer
from nightshift.data.rate_limiter import RateLimiter, RateLimits
from nightshift.data.replay import TrajectoryReplay, TransitionSpec
from nightshift.errors import DataError, StreamError
from nightshift.stream.inbox import Inbox
from nightshift.stream.link import LearnerEndpoint, LocalLink
from nightshift.stream.online_replay import OnlineReplay
from nightshift.stream.sender import Sender
from nightshift.stream.server import Server
from nightshift.stream.spool import SPOOLED, Spool, SpoolLimits
from nightshift.stream.tcp_link import TcpLink
from tests.data.examples import make
from tests.data.replay.examples import record_opened_files
from tests.stream.parts import RUN, episode_id, message
from tests.waiting import wait_until

LIMITS = RateLimits.sample_to_insert_ratio(4, min_size_to_sample=10, error_buffer=60)
WIDE = RateLimits.sample_to_insert_ratio(1, min_size_to_sample=1, error_buffer=1000)


@pytest.fixture
def inbox(tmp_path: Path) -> Iterator[Inbox]:
    with Inbox(tmp_path / "inbox", run=RUN) as opened:
        yield opened


def arrive(inbox: Inbox, numbers: range) -> None:
    """Episodes of five transitions each."""
    for number in numbers:
        assert inbox.receive(message(episode_id(number))).outcome == "accepted"


def open_replay(inbox: Inbox, limits: RateLimits = LIMITS, **options: Any) -> OnlineReplay:
    return OnlineReplay(inbox, RateLimiter(limits), TransitionSpec(), seed=3, **options)


def same(left: Any, right: Any) -> bool:
    return all(np.array_equal(left[name], right[name]) for name in ("episode", "t", "actions", "rewards", "mask"))


@pytest.mark.parametrize("window", [0, 4])
def test_a_replay_restored_from_a_checkpoint_samples_the_same_batches(tmp_path: Path, window: int) -> None:
    with Inbox(tmp_path / "inbox", run=RUN) as inbox:
        arrive(inbox, range(6))
        replay = open_replay(inbox, window=window)
        for _ in range(3):
            replay.sample(8)
        saved = json.loads(json.dumps(replay.state_dict()))
        arrive(inbox, range(6, 7))
        expected = [replay.sample(8) for _ in range(6)]
    with Inbox(tmp_path / "inbox", run=RUN) as again:
        resumed = open_replay(again, window=window)
        resumed.load_state_dict(saved)
        assert all(same(resumed.sample(8), batch) for batch in expected)


def test_samples_per_insert_stay_in_the_band(inbox: Inbox) -> None:
    arrive(inbox, range(4))
    replay = open_replay(inbox)
    drawn = 0
    with pytest.raises(TimeoutError, match="too few episodes arrived"):
        while True:
            replay.sample(4, timeout=0)
            drawn += 4
    assert LIMITS.min_diff <= 4 * 20 - drawn < LIMITS.min_diff + 4
    arrive(inbox, range(4, 5))
    replay.sample(4, timeout=0)


def test_a_learner_can_ask_whether_a_batch_would_come_at_once(inbox: Inbox) -> None:
    replay = open_replay(inbox)
    assert not replay.can_sample(4)
    arrive(inbox, range(2))
    assert replay.can_sample(4)
    assert not replay.can_sample(500)
    assert replay.metrics()["rate_limiter/samples"] == 0
    assert replay.metrics()["online_replay/transitions"] == 10


def test_every_stored_episode_is_inserted_once(inbox: Inbox) -> None:
    arrive(inbox, range(5))
    replay = open_replay(inbox, WIDE)
    for _ in range(3):
        replay.sample(2)
    assert replay.total_samples == 25
    assert replay.metrics()["rate_limiter/inserts"] == 25


def test_a_deadlock_of_the_rate_limiter_is_reported(inbox: Inbox) -> None:
    arrive(inbox, range(5))
    replay = open_replay(inbox, RateLimits.sample_to_insert_ratio(4, min_size_to_sample=1, error_buffer=4))
    with pytest.raises(StreamError, match="blocks both a batch of 500 and the next episode"):
        replay.sample(500)


def test_an_arrival_is_opened_once(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = open_replay(inbox, WIDE)
    opened = record_opened_files(monkeypatch)
    for number in range(5):
        arrive(inbox, range(number, number + 1))
        for _ in range(3):
            replay.sample(20)
    assert sorted(opened) == [stored.path for stored in inbox.stored_after(0)]


@pytest.mark.skipif(sys.platform != "linux", reason="mappings are listed in /proc")
def test_what_falls_out_of_the_window_is_let_go_of(tmp_path: Path, inbox: Inbox) -> None:
    gc.freeze()  # what there was before: every collection would look at it
    replay = open_replay(inbox, WIDE, window=2)
    for number in range(8):
        arrive(inbox, range(number, number + 1))
        batch = replay.sample(40)
        assert set(batch["episode"].tolist()) <= {number, number + 1}  # positions count from 1
        gc.collect()
        assert str(tmp_path) in (maps := Path("/proc/self/maps").read_text())
        assert maps.count(f"{tmp_path}/") <= 2
    assert replay.total_samples == 10


def demos(count: int = 2) -> Any:
    replay = TrajectoryReplay(seed=9)
    replay.add_episodes(make(seed=100 + seed) for seed in range(count))
    return replay.source()


def test_a_mixer_waits_for_the_first_episodes_of_an_online_replay(inbox: Inbox) -> None:
    replay = open_replay(inbox)
    mixer = Mixer({"demos": demos(), "online": replay}, {"demos": 0.5, "online": 0.5})
    threading.Timer(0.1, arrive, (inbox, range(3))).start()
    batch = mixer.sample(8)
    assert np.bincount(batch["source"]).tolist() == [4, 4]
    assert set(batch["episode"][batch["source"] == 1].tolist()) <= {1, 2, 3}


class Broken:
    def sample(self, count: int, /) -> dict[str, Any]:
        raise TimeoutError(f"no batch of {count}")


def test_a_batch_that_never_came_is_not_counted(inbox: Inbox) -> None:
    arrive(inbox, range(6))
    replay, other = open_replay(inbox), open_replay(inbox)
    with pytest.raises(TimeoutError, match="no batch of 4"):
        Mixer({"online": replay, "demos": Broken()}, {"online": 0.5, "demos": 0.5}).sample(8)
    assert replay.metrics()["rate_limiter/samples"] == 0
    assert same(replay.sample(8), other.sample(8))


def test_a_flipped_bit_is_noticed_when_the_file_is_read_and_not_counted(inbox: Inbox) -> None:
    arrive(inbox, range(3))
    replay = open_replay(inbox)
    path = inbox.stored_after(0)[1].path
    content = bytearray(path.read_bytes())
    content[-100] ^= 4
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{path.name} is damaged: its checksum"):
        inbox.stored_after(0)[1].load()
    with pytest.raises(DataError, match=f"{path.name} is damaged: its checksum"):
        replay.sample(40)
    assert replay.metrics()["rate_limiter/samples"] == 0


@pytest.mark.parametrize(
    "change",
    [
        {"position": 3},
        {"position": 99},
        {"position": -1},
        {"position": 1.0},
        {"position": float("nan")},
        {"position": None},
        {"last_episode": f"{RUN}.arm.00000000000000000001.000000009.00000000"},
        {"last_episode": ""},
        {"limiter": {"inserts": -20, "samples": 8, "deletes": 0}},
        {"limiter": {"inserts": 10, "samples": 8, "deletes": 0}},
        {"limiter": {"inserts": 20, "samples": float("nan"), "deletes": 0}},
        {"limiter": None},
        {"random_state": "zz"},
        {"random_state": "00"},
        {"random_state": None},
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(inbox: Inbox, change: dict[str, Any]) -> None:
    arrive(inbox, range(4))
    replay = open_replay(inbox)
    replay.sample(8)
    before = replay.state_dict()
    with pytest.raises(DataError):
        replay.load_state_dict({**before, **change})
    assert replay.state_dict() == before
    assert replay.total_samples == 20


def test_the_state_of_another_inbox_is_refused(tmp_path: Path, inbox: Inbox) -> None:
    arrive(inbox, range(4))
    replay = open_replay(inbox)
    replay.sample(8)
    with Inbox(tmp_path / "other", run=RUN) as other:
        for number in range(4):
            other.receive(message(episode_id(number, epoch=2)))
        with pytest.raises(DataError, match="which is not in this inbox"):
            open_replay(other).load_state_dict(replay.state_dict())


@pytest.mark.parametrize("kind", ["local", "tcp"])
def test_actors_wait_while_nobody_samples_and_go_on_when_somebody_does(tmp_path: Path, kind: str) -> None:
    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(LearnerEndpoint.open(tmp_path, run=RUN))
        spool = stack.enter_context(
            Spool(tmp_path / "spool", run=RUN, actor="arm", limits=SpoolLimits(max_episodes=4, timeout=60))
        )
        replay = open_replay(endpoint.inbox)
        server = stack.enter_context(Server(endpoint))
        link = LocalLink(endpoint) if kind == "local" else TcpLink("127.0.0.1", server.port)
        stack.enter_context(Sender(spool, link, poll_interval=0.02))
        put = threading.Thread(target=lambda: [spool.put(make(seed=seed)) for seed in range(50)])
        put.start()
        while spool.metrics()["stream/inserted"] < 10 or spool.metrics()["stream/deferred"] < 8:
            threading.Event().wait(0.01)
        # 25 transitions fit into the limits, one episode more is stored, and four are in the spool.
        assert (len(endpoint.inbox), spool.metrics()["stream/spooled"], spool.metrics()["stream/inserted"]) == (
            6,
            4,
            10,
        )
        assert spool.metrics()["stream/link_failures"] == 0
        assert put.is_alive()
        while put.is_alive() or spool.metrics()["stream/spooled"]:
            with contextlib.suppress(TimeoutError):
                replay.sample(4, timeout=0.05)
        assert len(endpoint.inbox) == 50


def test_a_put_that_times_out_says_that_the_learner_does_not_sample(tmp_path: Path) -> None:
    with (
        LearnerEndpoint.open(tmp_path, run=RUN) as endpoint,
        Spool(tmp_path / "spool", run=RUN, actor="arm", limits=SpoolLimits(max_episodes=1, timeout=0.5)) as spool,
        Sender(spool, LocalLink(endpoint), poll_interval=0.02),
    ):
        open_replay(endpoint.inbox)
        with pytest.raises(StreamError, match=r"is full: .*; the learner takes no more episodes until it has sampled"):
            for seed in range(20):
                wait_until(lambda: spool._obstacle or not spool.metrics()[SPOOLED])
                spool.put(make(seed=seed))


def test_weights_reach_an_actor_that_waits(tmp_path: Path) -> None:
    with (
        LearnerEndpoint.open(tmp_path, run=RUN) as endpoint,
        Spool(tmp_path / "spool", run=RUN, actor="arm") as spool,
        Sender(spool, LocalLink(endpoint), poll_interval=0.02) as sender,
    ):
        open_replay(endpoint.inbox)
        for seed in range(20):
            spool.put(make(seed=seed))
        assert wait_until(lambda: spool.metrics()["stream/deferred"])
        version = endpoint.publisher.publish({"w": np.zeros(2, np.float32)})
        assert wait_until(lambda: sender.version >= version)


@pytest.mark.slow
def test_a_hundred_thousand_episodes_are_sampled_with_a_bounded_number_of_mappings(tmp_path: Path) -> None:
    folder = tmp_path / "inbox" / "episodes"
    with Inbox(tmp_path / "inbox", run=RUN) as inbox:
        arrive(inbox, range(2))
        first, second = (stored.path for stored in inbox.stored_after(0))
    for position in range(3, 100_001):
        origin = first if position % 2 else second  # a file has at most 65,000 names
        name = origin.name.replace(".000000000.", f".{position:09d}.").replace(".000000001.", f".{position:09d}.")
        (folder / f"{position:09d}{name[9:]}").hardlink_to(origin)
    with Inbox(tmp_path / "inbox", run=RUN) as inbox:
        replay = open_replay(inbox, RateLimits.sample_to_insert_ratio(1, 1, 10_000_000))
        seen = set()
        for _ in range(50):
            seen |= set(replay.sample(512)["episode"].tolist())
        assert len(seen) > 16_384
        assert Path("/proc/self/maps").read_text().count(f"{tmp_path}/") <= 16_384
