from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightshift.data.rate_limiter import RateLimiter, RateLimits
from nightshift.data.replay import TransitionSpec
from nightshift.errors import StreamError
from nightshift.stream.inbox import Inbox
from nightshift.stream.link import LearnerEndpoint, LocalLink
from nightshift.stream.online_replay import OnlineReplay
from nightshift.stream.sender import Sender
from nightshift.stream.spool import Spool
from nightshift.stream.weights import WeightPublisher
from tests.data.examples import make

LIMITS = RateLimits.sample_to_insert_ratio(4, min_size_to_sample=10, error_buffer=60)


def arrive(folder: Path, inbox: Inbox, seeds: range) -> None:
    """Episodes of five transitions each, sent by an actor that then exits."""
    spool = Spool(folder / "spool", run="night", actor="arm")
    sender = Sender(spool, LocalLink(LearnerEndpoint(inbox, WeightPublisher(folder / "weights"))))
    for seed in seeds:
        spool.put(make(seed=seed))
    spool.wait_until_empty(timeout=30)
    sender.close()
    spool.close()


def open_replay(inbox: Inbox, limits: RateLimits = LIMITS) -> OnlineReplay:
    return OnlineReplay(inbox, RateLimiter(limits), TransitionSpec(), seed=3)


def same(left: Any, right: Any) -> bool:
    return all(np.array_equal(left[name], right[name]) for name in ("episode", "t", "actions", "rewards", "mask"))


def test_a_replay_restored_from_a_checkpoint_samples_the_same_batches(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path / "inbox", run="night")
    arrive(tmp_path, inbox, range(6))
    replay = open_replay(inbox)
    for _ in range(3):
        replay.sample(8)
    saved = json.loads(json.dumps(replay.state_dict()))
    arrive(tmp_path, inbox, range(6, 9))
    expected = [replay.sample(8) for _ in range(6)]
    inbox.close()

    again = Inbox(tmp_path / "inbox", run="night")
    resumed = open_replay(again)
    resumed.load_state_dict(saved)
    assert all(same(resumed.sample(8), batch) for batch in expected)
    again.close()


def test_samples_per_insert_stay_in_the_band(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path / "inbox", run="night")
    arrive(tmp_path, inbox, range(4))
    replay = open_replay(inbox)
    drawn = 0
    with pytest.raises(TimeoutError, match="too few episodes arrived"):
        while True:
            replay.sample(4, timeout=0)
            drawn += 4
    assert LIMITS.min_diff <= 4 * 20 - drawn < LIMITS.min_diff + 4
    arrive(tmp_path, inbox, range(4, 5))
    replay.sample(4, timeout=0)
    inbox.close()


def test_every_stored_episode_is_inserted_once(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path / "inbox", run="night")
    arrive(tmp_path, inbox, range(5))
    replay = open_replay(inbox, RateLimits.sample_to_insert_ratio(1, min_size_to_sample=1, error_buffer=1000))
    for _ in range(3):
        replay.sample(2)
    assert replay.total_samples == 25
    assert replay.metrics()["rate_limiter/inserts"] == 25
    inbox.close()


def test_a_deadlock_of_the_rate_limiter_is_reported(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path / "inbox", run="night")
    arrive(tmp_path, inbox, range(5))
    replay = open_replay(inbox, RateLimits.sample_to_insert_ratio(4, min_size_to_sample=1, error_buffer=4))
    with pytest.raises(StreamError, match="blocks both a batch of 500 and the next episode"):
        replay.sample(500)
    inbox.close()
