import errno
import logging
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nightshift import files
from nightshift.data import episode as episodes
from nightshift.errors import DataError, StreamError
from nightshift.stream.identity import Identity
from nightshift.stream.inbox import Inbox
from nightshift.stream.message import Label, Parcel
from tests.data.examples import assert_same
from tests.stream.parts import RUN, contents, episode_of, identity, parcel, parcel_of


def open_inbox(folder: Path, **options: Any) -> Inbox:
    return Inbox(folder, run=RUN, **options)


def test_an_episode_is_stored_once_byte_for_byte(tmp_path: Path) -> None:
    inbox = open_inbox(tmp_path)
    sent = parcel(identity(0))
    assert inbox.receive(sent).outcome == "accepted"
    assert inbox.receive(sent).outcome == "duplicate"
    assert contents(inbox) == {identity(0): sent.content}
    assert_same(inbox.since(0)[0].load(), episode_of(identity(0)))


def test_a_learner_that_is_started_again_knows_what_it_has(tmp_path: Path) -> None:
    first = open_inbox(tmp_path)
    for number in (3, 1, 2):
        first.receive(parcel(identity(number)))
    first.close()
    second = open_inbox(tmp_path)
    assert [arrival.label.identity.number for arrival in second.since(0)] == [3, 1, 2]
    assert second.receive(parcel(identity(1))).outcome == "duplicate"
    assert second.receive(parcel(identity(4))).outcome == "accepted"
    assert [arrival.position for arrival in second.since(0)] == [1, 2, 3, 4]


def test_a_consumer_that_keeps_its_position_meets_each_episode_once_across_restarts(tmp_path: Path) -> None:
    met, position = [], 0
    for start in range(4):
        inbox = open_inbox(tmp_path)
        for number in range(start * 3, start * 3 + 3):
            inbox.receive(parcel(identity(number)))
        for arrival in inbox.since(position)[: 1 + start]:
            met.append(arrival.label.identity.number)
            position = arrival.position
        inbox.close()
    inbox = open_inbox(tmp_path)
    met.extend(arrival.label.identity.number for arrival in inbox.since(position))
    assert met == list(range(12))


def test_a_consumer_waits_for_what_comes_next(tmp_path: Path) -> None:
    inbox = open_inbox(tmp_path)
    assert not inbox.await_arrival(0, timeout=0.01)
    threading.Timer(0.1, lambda: inbox.receive(parcel(identity(0)))).start()
    assert inbox.await_arrival(0, timeout=10)


BAD = {
    "not finite .*step 2": parcel(identity(1), rewards=np.array([0, 0, np.nan, 0, 0, 0], np.float32)),
    "actions is float64, not float32": parcel(identity(1), actions=episode_of(identity(1)).actions.astype(np.float64)),
    "observations.objects is missing": parcel(
        identity(1), observations={"proprio": episode_of(identity(1)).observations["proprio"]}
    ),
    "extras.force is not declared": parcel(identity(1), extras={"force": np.zeros((6, 1))}),
    "are not a readable safetensors file": parcel_of(identity(1), b"\x80\x04garbage" * 20),
    "checksum": Parcel(Label(identity(1), 7), episodes.to_bytes(episode_of(identity(1)))),
    "by its own word it is": parcel_of(identity(1), episodes.to_bytes(episode_of(identity(2)))),
    "this is the learner of run night-1": parcel(identity(1, run="night-2")),
    "another episode is stored under this identity": parcel(identity(0), rewards=np.zeros(6, np.float32)),
    "actions has no steps": parcel(identity(1), actions=np.float32(3)),
}


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_episode_is_rejected_and_named_and_the_stream_lives_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    inbox = open_inbox(tmp_path)
    inbox.receive(parcel(identity(0)))
    for _ in range(2):  # sent again, it is rejected again
        with caplog.at_level(logging.WARNING):
            receipt = inbox.receive(BAD[reason])
        assert receipt.outcome == "rejected"
        assert f"episode {BAD[reason].label.identity.number} of actor arm" in receipt.reason
        assert re.search(reason, receipt.reason)
        assert receipt.reason in caplog.text
    assert inbox.receive(parcel(identity(9))).outcome == "accepted"
    assert set(contents(inbox)) == {identity(0), identity(9)}
    assert inbox.metrics() == {
        "inbox/accepted": 2,
        "inbox/duplicate": 0,
        "inbox/rejected": 2,
        "inbox/stored": 2,
    }


def test_a_bad_first_episode_declares_nothing(tmp_path: Path) -> None:
    inbox = open_inbox(tmp_path)
    bad = parcel(identity(0), rewards=np.full(6, np.inf, np.float32))
    assert inbox.receive(bad).outcome == "rejected"
    assert inbox.receive(parcel(identity(1))).outcome == "accepted"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.integers(0, 3000), value=st.integers(0, 255), cut=st.integers(0, 3000), data=st.binary(max_size=9))
def test_no_bytes_whatever_stop_the_inbox(tmp_path: Path, where: int, value: int, cut: int, data: bytes) -> None:
    """Even with a checksum that fits: what is stored can be read, and what cannot is rejected."""
    whole = bytearray(episodes.to_bytes(episode_of(identity(0))))
    whole[where % len(whole)] = value
    mangled = bytes(whole[: len(whole) - cut]) + data
    folder = tmp_path / f"{where}-{value}-{cut}-{data.hex()}"
    inbox = open_inbox(folder)
    receipt = inbox.receive(parcel_of(identity(0), mangled))
    assert receipt.outcome in ("accepted", "rejected")
    for arrival in inbox.since(0):
        arrival.load()
    inbox.close()


def test_many_actors_at_once_are_stored_once_each(tmp_path: Path) -> None:
    inbox = open_inbox(tmp_path)
    outcomes: list[str] = []
    sent = [parcel(identity(number, actor=f"arm-{actor}")) for actor in range(4) for number in range(5)]

    def deliver() -> None:
        outcomes.extend(inbox.receive(each).outcome for each in sent)

    threads = [threading.Thread(target=deliver) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("accepted") == len(sent)
    assert outcomes.count("duplicate") == 3 * len(sent)
    assert contents(inbox) == {each.label.identity: each.content for each in sent}
    assert [arrival.position for arrival in inbox.since(0)] == list(range(1, len(sent) + 1))


def test_a_disk_that_fails_stores_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder could not be synced after the rename: whether the file is there is for the next learner to see."""
    inbox = open_inbox(tmp_path)
    inbox.receive(parcel(identity(0)))

    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(files, "sync", fail)
        with pytest.raises(OSError, match="input/output"):
            inbox.receive(parcel(identity(1)))
    with pytest.raises(StreamError, match="restart the learner"):
        inbox.receive(parcel(identity(1)))
    inbox.close()
    again = open_inbox(tmp_path)
    assert again.receive(parcel(identity(1))).outcome == "duplicate"
    assert set(contents(again)) == {identity(0), identity(1)}


def test_a_full_disk_is_no_rejection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = open_inbox(tmp_path)
    inbox.receive(parcel(identity(0)))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as broken:
        broken.setattr("os.fsync", full)
        with pytest.raises(Exception, match="no space left on the disk"):
            inbox.receive(parcel(identity(1)))
    assert inbox.receive(parcel(identity(1))).outcome == "accepted"


def test_a_renamed_episode_is_synced_before_a_new_learner_vouches_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_inbox(tmp_path).receive(parcel(identity(0)))
    synced: list[Path] = []
    monkeypatch.setattr(files, "sync", synced.append)
    monkeypatch.setattr("nightshift.stream.inbox.Claim", lambda folder, error: None)
    open_inbox(tmp_path)
    assert synced == [tmp_path / "episodes"]


@pytest.mark.slow
def test_a_hundred_thousand_episodes_are_known_without_asking_the_disk(tmp_path: Path) -> None:
    (tmp_path / "episodes").mkdir(parents=True)
    for number in range(100_000):
        label = Label(Identity(RUN, "arm", 1, number), 0)
        (tmp_path / "episodes" / f"{number + 1:09d}.{label.key}.safetensors").touch()
    inbox = open_inbox(tmp_path)
    assert len(inbox) == 100_000
    (tmp_path / "episodes").rename(tmp_path / "elsewhere")
    assert identity(99_999) in inbox
    assert identity(100_000) not in inbox
    assert [arrival.position for arrival in inbox.since(99_998)] == [99_999, 100_000]


def test_a_stray_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "episodes").mkdir(parents=True)
    (tmp_path / "episodes" / "mine.safetensors").touch()
    with pytest.raises(DataError, match=r"mine\.safetensors was not written by a learner"):
        open_inbox(tmp_path)


def test_two_learners_cannot_share_an_inbox(tmp_path: Path) -> None:
    inbox = open_inbox(tmp_path)
    with pytest.raises(StreamError, match="is in use"):
        open_inbox(tmp_path)
    inbox.close()
    open_inbox(tmp_path)


def test_the_inbox_of_another_run_is_not_taken_over(tmp_path: Path) -> None:
    inbox = open_inbox(tmp_path)
    inbox.receive(parcel(identity(0)))
    inbox.close()
    with pytest.raises(DataError, match="holds episodes of run night-1, not of night-2"):
        Inbox(tmp_path, run="night-2")


def test_a_copied_file_is_noticed(tmp_path: Path) -> None:
    inbox = open_inbox(tmp_path)
    inbox.receive(parcel(identity(0)))
    inbox.close()
    path = inbox.since(0)[0].path
    path.with_name(path.name.replace("000000001", "000000002", 1)).write_bytes(path.read_bytes())
    with pytest.raises(DataError, match="holds an episode twice"):
        open_inbox(tmp_path)
