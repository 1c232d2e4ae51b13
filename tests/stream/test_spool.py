import json
import multiprocessing
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nightshift.data import episode as episodes
from nightshift.errors import DataError, StreamError
from nightshift.stream.message import Parcel, Receipt
from nightshift.stream.spool import EPOCH, Room
from tests.data.examples import assert_same, make
from tests.stream.parts import open_spool


def accept(parcel: Parcel) -> Receipt:
    return Receipt(parcel.label, "accepted")


def test_what_is_put_waits_in_order_under_its_identity(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    made = [spool.put(make(seed=seed)) for seed in range(3)]
    parcels = list(spool.waiting())
    assert [parcel.label.identity for parcel in parcels] == made
    for seed, parcel in enumerate(parcels):
        found = episodes.from_bytes(parcel.content)
        assert found.provenance.origin == made[seed].key
        assert_same(replace(found, provenance=make().provenance), make(seed=seed))


def test_leftovers_of_an_earlier_epoch_keep_their_identity_and_go_first(tmp_path: Path) -> None:
    first = open_spool(tmp_path)
    old = [first.put(make(seed=seed)) for seed in range(2)]
    before = [bytes(parcel.content) for parcel in first.waiting()]
    first.close()
    second = open_spool(tmp_path)
    new = second.put(make(seed=2))
    assert new.epoch > old[0].epoch
    parcels = list(second.waiting())
    assert [parcel.label.identity for parcel in parcels] == [*old, new]
    assert [bytes(parcel.content) for parcel in parcels[:2]] == before


def test_epochs_grow_whatever_the_clock_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    epochs = []
    for now in (1000.0, 1000.0, 2000.0, 500.0):
        monkeypatch.setattr("time.time", lambda now=now: now)
        spool = open_spool(tmp_path)
        epochs.append(spool.put(make()).epoch)
        spool.close()
    assert epochs == [1000, 1001, 2000, 2001]


def test_an_actor_whose_disk_was_lost_does_not_use_an_identity_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_spool(tmp_path / "before").put(make())
    monkeypatch.setattr("time.time", lambda: before.epoch + 60.0)
    assert open_spool(tmp_path / "after").put(make()) != before


def test_what_was_acknowledged_is_gone_and_what_was_rejected_is_kept_with_the_reason(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    for seed in range(3):
        spool.put(make(seed=seed))
    one, two, three = spool.waiting()
    spool.settle(accept(one))
    spool.settle(Receipt(two.label, "rejected", "actions is not finite"))
    spool.settle(Receipt(three.label, "duplicate"))
    assert not list(spool.waiting())
    kept = tmp_path / "rejected" / f"{two.label.key}.safetensors"
    assert kept.read_bytes() == two.content
    assert json.loads(kept.with_suffix(".json").read_text()) == {"reason": "actions is not finite"}
    metrics = spool.metrics()
    assert metrics["stream/inserted"] == 3
    assert metrics["stream/sent"] == 3
    assert metrics["stream/acknowledged"] == 2
    assert metrics["stream/duplicates"] == 1
    assert metrics["stream/rejected"] == 1
    assert metrics["stream/spooled"] == metrics["stream/spooled_bytes"] == 0


def test_a_full_spool_raises_when_told_to_and_drops_nothing(tmp_path: Path) -> None:
    spool = open_spool(tmp_path, room=Room(episodes=2, patience=0))
    kept = [spool.put(make(seed=seed)) for seed in range(2)]
    spool.hinder("no learner at 10.0.0.1:4100: connection refused")
    with pytest.raises(StreamError, match=r"is full: 2 episodes wait .*; no learner at 10\.0\.0\.1:4100"):
        spool.put(make(seed=2))
    assert [parcel.label.identity for parcel in spool.waiting()] == kept
    spool.settle(accept(next(spool.waiting())))
    spool.put(make(seed=2))


def test_room_is_counted_in_bytes_too(tmp_path: Path) -> None:
    spool = open_spool(tmp_path / "a")
    spool.put(make())
    size = int(spool.metrics()["stream/spooled_bytes"])
    small = open_spool(tmp_path / "b", room=Room(bytes=2 * size + 1, patience=0))
    small.put(make())
    small.put(make())
    with pytest.raises(StreamError, match="is full"):
        small.put(make())
    with pytest.raises(DataError, match="give the spool more room"):
        open_spool(tmp_path / "c", room=Room(bytes=size - 1)).put(make())


def test_a_full_spool_makes_put_wait_until_there_is_room(tmp_path: Path) -> None:
    spool = open_spool(tmp_path, room=Room(episodes=1))
    spool.put(make(seed=0))
    done = threading.Event()

    def second() -> None:
        spool.put(make(seed=1))
        done.set()

    thread = threading.Thread(target=second)
    thread.start()
    assert not done.wait(0.2)
    spool.settle(accept(next(spool.waiting())))
    assert done.wait(10)
    thread.join()
    assert [parcel.label.identity.number for parcel in spool.waiting()] == [1]


def test_a_put_that_waits_hears_of_a_courier_that_stopped(tmp_path: Path) -> None:
    spool = open_spool(tmp_path, room=Room(episodes=1))
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
    assert len(list(spool.waiting())) == 2


def _try_to_open(folder: Path, said: "multiprocessing.Queue[str]") -> None:
    try:
        open_spool(folder)
        said.put("opened")
    except StreamError as error:
        said.put(error.what)


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
    with pytest.raises(DataError, match="'mine' does not name an episode"):
        open_spool(tmp_path)
