import json
import multiprocessing
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nightshift.data import episode as episodes
from nightshift.errors import DataError, StreamError
from nightshift.stream.episode_id import EpisodeId
from nightshift.stream.message import Ack, Message
from nightshift.stream.spool import EPOCH, SpoolLimits
from tests.data.examples import assert_same, make
from tests.stream.parts import open_spool


def accept(message: Message) -> Ack:
    return Ack(message.header, "accepted")


def test_episodes_are_kept_in_order_under_their_ids(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    made = [spool.put(make(seed=seed)) for seed in range(3)]
    messages = list(spool.unacknowledged())
    assert [message.header.episode_id for message in messages] == made
    for seed, message in enumerate(messages):
        found = episodes.from_bytes(message.payload)
        assert found.provenance.origin == made[seed].key
        assert_same(replace(found, provenance=make().provenance), make(seed=seed))


def test_episodes_of_an_earlier_epoch_keep_their_ids_and_are_sent_first(tmp_path: Path) -> None:
    first = open_spool(tmp_path)
    old = [first.put(make(seed=seed)) for seed in range(2)]
    before = [bytes(message.payload) for message in first.unacknowledged()]
    first.close()
    second = open_spool(tmp_path)
    new = second.put(make(seed=2))
    assert new.epoch > old[0].epoch
    messages = list(second.unacknowledged())
    assert [message.header.episode_id for message in messages] == [*old, new]
    assert [bytes(message.payload) for message in messages[:2]] == before


def test_epochs_grow_whatever_the_clock_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    epochs = []
    for now in (1000.0, 1000.0, 2000.0, 500.0):
        monkeypatch.setattr("time.time", lambda now=now: now)
        spool = open_spool(tmp_path)
        epochs.append(spool.put(make()).epoch)
        spool.close()
    assert epochs == sorted(set(epochs))
    assert [epoch // 10**10 for epoch in epochs] == [1000, 1000, 2000, 2000]


def test_actors_of_one_name_on_several_disks_do_not_share_an_episode_id_within_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines of one name, or one whose disk was lost, with whatever clock."""
    monkeypatch.setattr("time.time", lambda: 1000.5)
    made = [open_spool(tmp_path / f"disk-{number}").put(make()) for number in range(50)]
    assert len(set(made)) == 50


def test_acknowledged_episodes_are_deleted_and_rejected_ones_kept_with_the_reason(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    for seed in range(3):
        spool.put(make(seed=seed))
    one, two, three = spool.unacknowledged()
    spool.handle_ack(accept(one))
    spool.handle_ack(Ack(two.header, "rejected", "actions is not finite"))
    spool.handle_ack(Ack(three.header, "duplicate"))
    assert not list(spool.unacknowledged())
    kept = tmp_path / "rejected" / f"{two.header.key}.safetensors"
    assert kept.read_bytes() == two.payload
    assert json.loads(kept.with_suffix(".json").read_text()) == {"reason": "actions is not finite"}
    metrics = spool.metrics()
    assert metrics["stream/inserted"] == 3
    assert metrics["stream/sent"] == 3
    assert metrics["stream/acknowledged"] == 2
    assert metrics["stream/duplicates"] == 1
    assert metrics["stream/rejected"] == 1
    assert metrics["stream/spooled"] == metrics["stream/spooled_bytes"] == 0


def test_a_full_spool_raises_when_told_to_and_drops_nothing(tmp_path: Path) -> None:
    spool = open_spool(tmp_path, limits=SpoolLimits(max_episodes=2, timeout=0))
    kept = [spool.put(make(seed=seed)) for seed in range(2)]
    spool.set_obstacle("no learner at 10.0.0.1:4100: connection refused")
    with pytest.raises(StreamError, match=r"is full: 2 episodes are unacknowledged.*; no learner at 10\.0\.0\.1:4100"):
        spool.put(make(seed=2))
    assert [message.header.episode_id for message in spool.unacknowledged()] == kept
    spool.handle_ack(accept(next(spool.unacknowledged())))
    spool.put(make(seed=2))


def test_the_limit_in_bytes_holds_too(tmp_path: Path) -> None:
    spool = open_spool(tmp_path / "a")
    spool.put(make())
    size = int(spool.metrics()["stream/spooled_bytes"])
    small = open_spool(tmp_path / "b", limits=SpoolLimits(max_bytes=2 * size + 1, timeout=0))
    small.put(make())
    small.put(make())
    with pytest.raises(StreamError, match="is full"):
        small.put(make())
    with pytest.raises(DataError, match="increase max_bytes"):
        open_spool(tmp_path / "c", limits=SpoolLimits(max_bytes=size - 1)).put(make())


def test_put_blocks_until_the_spool_has_space(tmp_path: Path) -> None:
    spool = open_spool(tmp_path, limits=SpoolLimits(max_episodes=1))
    spool.put(make(seed=0))
    done = threading.Event()

    def second() -> None:
        spool.put(make(seed=1))
        done.set()

    thread = threading.Thread(target=second)
    thread.start()
    assert not done.wait(0.2)
    spool.handle_ack(accept(next(spool.unacknowledged())))
    assert done.wait(10)
    thread.join()
    assert [message.header.episode_id.number for message in spool.unacknowledged()] == [1]


def test_a_blocked_put_raises_when_the_sender_stops(tmp_path: Path) -> None:
    spool = open_spool(tmp_path, limits=SpoolLimits(max_episodes=1))
    spool.put(make())
    threading.Timer(0.1, lambda: spool.fail(OSError("the disk is gone"))).start()
    with pytest.raises(StreamError, match="the disk is gone"):
        spool.put(make())


def test_an_episode_that_breaks_the_schema_is_refused_before_it_is_spooled(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    spool.put(make())
    with pytest.raises(DataError, match=r"rewards is not finite .*step 3"):
        spool.put(make(rewards=np.array([0, 0, 0, np.nan, 0, 0], np.float32)))
    spool.put(make())
    assert len(list(spool.unacknowledged())) == 2


def test_waiting_episodes_are_not_sorted_again_for_every_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_spool(tmp_path) as spool:
        made = [spool.put(make(steps=2, seed=seed)) for seed in range(20)]
    with open_spool(tmp_path) as again:
        made.append(again.put(make(steps=2, seed=20)))
        compared: list[int] = []
        monkeypatch.setattr(EpisodeId, "__lt__", lambda *_: compared.append(1))
        sent: list[EpisodeId] = []
        while batch := list(again.unacknowledged(4)):
            sent.extend(message.header.episode_id for message in batch)
            for message in batch:
                again.handle_ack(accept(message))
        assert sent == made
        assert not compared
        assert again.metrics()["stream/spooled_bytes"] == 0


def _try_to_open(folder: Path, said: "multiprocessing.Queue[str]") -> None:
    try:
        open_spool(folder)
        said.put("opened")
    except StreamError as error:
        said.put(error.what)


@pytest.mark.usefixtures("forked_processes")
def test_two_processes_cannot_work_in_one_spool(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    context = multiprocessing.get_context("spawn")
    said = context.Queue()
    for expected in ("is in use by process", "opened"):
        other = context.Process(target=_try_to_open, args=(tmp_path, said))
        other.start()
        assert expected in said.get(timeout=60)
        other.join()
        spool.close() if expected != "opened" else None
    open_spool(tmp_path)  # the lock of a process ends with it


def test_a_damaged_epoch_is_named(tmp_path: Path) -> None:
    (tmp_path / EPOCH).write_text("{")
    with pytest.raises(DataError, match=r"epoch\.json is damaged"):
        open_spool(tmp_path)


def test_a_stray_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "waiting").mkdir()
    (tmp_path / "waiting" / "mine.safetensors").write_bytes(b"")
    with pytest.raises(DataError, match="'mine' is not the key of a message"):
        open_spool(tmp_path)
