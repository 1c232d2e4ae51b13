from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightshift.data.limiter import Band, Limiter
from nightshift.data.replay import View
from nightshift.errors import StreamError
from nightshift.stream.experience import Experience
from nightshift.stream.inbox import Inbox
from nightshift.stream.link import Desk, LocalLink
from nightshift.stream.sender import Courier
from nightshift.stream.spool import Spool
from nightshift.stream.weights import Publisher
from tests.data.examples import make

BAND = Band.ratio(4, min_size=10, error=60)


def arrive(folder: Path, inbox: Inbox, seeds: range) -> None:
    """Episodes of five transitions each, sent by an actor that then goes home."""
    spool = Spool(folder / "spool", run="night", actor="arm")
    courier = Courier(spool, LocalLink(Desk(inbox, Publisher(folder / "weights"))))
    for seed in seeds:
        spool.put(make(seed=seed))
    spool.await_empty(timeout=30)
    courier.close()
    spool.close()


def open_experience(inbox: Inbox, band: Band = BAND) -> Experience:
    return Experience(inbox, Limiter(band), View(), seed=3)


def same(left: Any, right: Any) -> bool:
    return all(np.array_equal(left[name], right[name]) for name in ("episode", "t", "actions", "rewards", "mask"))


def test_restarted_from_a_checkpoint_both_sides_go_on_with_the_same_batches(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path / "inbox", run="night")
    arrive(tmp_path, inbox, range(6))
    experience = open_experience(inbox)
    for _ in range(3):
        experience.sample(8)
    saved = json.loads(json.dumps(experience.state_dict()))
    arrive(tmp_path, inbox, range(6, 9))
    expected = [experience.sample(8) for _ in range(6)]
    inbox.close()

    again = Inbox(tmp_path / "inbox", run="night")
    resumed = open_experience(again)
    resumed.load_state_dict(saved)
    assert all(same(resumed.sample(8), batch) for batch in expected)
    again.close()


def test_samples_per_insert_stay_in_the_band(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path / "inbox", run="night")
    arrive(tmp_path, inbox, range(4))
    experience = open_experience(inbox)
    drawn = 0
    with pytest.raises(TimeoutError, match="no episode arrived"):
        while True:
            experience.sample(4, timeout=0)
            drawn += 4
    assert BAND.min_diff <= 4 * 20 - drawn < BAND.min_diff + 4
    arrive(tmp_path, inbox, range(4, 5))
    experience.sample(4, timeout=0)
    inbox.close()


def test_every_arrival_is_taken_in_once(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path / "inbox", run="night")
    arrive(tmp_path, inbox, range(5))
    experience = open_experience(inbox, Band.ratio(1, min_size=1, error=1000))
    for _ in range(3):
        experience.sample(2)
    assert experience.total_samples == 25
    assert experience.metrics()["limiter/inserts"] == 25
    inbox.close()


def test_a_band_in_which_nobody_can_move_is_told(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path / "inbox", run="night")
    arrive(tmp_path, inbox, range(5))
    experience = open_experience(inbox, Band.ratio(4, min_size=1, error=4))
    with pytest.raises(StreamError, match="neither lets a batch of 500 out"):
        experience.sample(500)
    inbox.close()
