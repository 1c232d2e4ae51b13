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
from nightshift.data.episode_store import EpisodeStore
from nightshift.errors import DataError, ProjectError, StreamError
from nightshift.stream.episode_id import EpisodeId
from nightshift.stream.inbox import NO_ROOM, Inbox
from nightshift.stream.message import Message, MessageHeader
from tests.data.examples import assert_same
from tests.stream.parts import RUN, contents, episode_id, episode_of, message, message_of


def open_inbox(folder: Path, **options: Any) -> Inbox:
    return Inbox(folder, run=RUN, **options)


def test_an_episode_is_stored_once_byte_for_byte(tmp_path: Path) -> None:
    inbox = open_inbox(tmp_path)
    sent = message(episode_id(0))
    assert inbox.receive(sent).outcome == "accepted"
    assert inbox.receive(sent).outcome == "duplicate"
    assert contents(inbox) == {episode_id(0): sent.payload}
    assert_same(inbox.stored_after(0)[0].load(), episode_of(episode_id(0)))


def test_a_restarted_learner_knows_its_episodes(tmp_path: Path) -> None:
    first = open_inbox(tmp_path)
    for number in (3, 1, 2):
        first.receive(message(episode_id(number)))
    first.close()
    second = open_inbox(tmp_path)
    assert [stored.header.episode_id.number for stored in second.stored_after(0)] == [3, 1, 2]
    assert second.receive(message(episode_id(1))).outcome == "duplicate"
    assert second.receive(message(episode_id(4))).outcome == "accepted"
    assert [stored.position for stored in second.stored_after(0)] == [1, 2, 3, 4]


def test_a_reader_that_keeps_its_position_sees_each_episode_once_across_restarts(tmp_path: Path) -> None:
    seen, position = [], 0
    for start in range(4):
        inbox = open_inbox(tmp_path)
        for number in range(start * 3, start * 3 + 3):
            inbox.receive(message(episode_id(number)))
        for stored in inbox.stored_after(position)[: 1 + start]:
            seen.append(stored.header.episode_id.number)
            position = stored.position
        inbox.close()
    inbox = open_inbox(tmp_path)
    seen.extend(stored.header.episode_id.number for stored in inbox.stored_after(position))
    assert seen == list(range(12))


def test_a_reader_waits_for_the_next_episode(tmp_path: Path) -> None:
    inbox = open_inbox(tmp_path)
    assert not inbox.wait_for_episode(0, timeout=0.01)
    threading.Timer(0.1, lambda: inbox.receive(message(episode_id(0)))).start()
    assert inbox.wait_for_episode(0, timeout=10)


BAD = {
    "not finite .*step 2": message(episode_id(1), rewards=np.array([0, 0, np.nan, 0, 0, 0], np.float32)),
    "actions is float64, not float32": message(
        episode_id(1), actions=episode_of(episode_id(1)).actions.astype(np.float64)
    ),
    "observations.objects is missing": message(
        episode_id(1), observations={"proprio": episode_of(episode_id(1)).observations["proprio"]}
    ),
    "extras.force is not declared": message(episode_id(1), extras={"force": np.zeros((6, 1))}),
    "are not a readable safetensors file": message_of(episode_id(1), b"\x80\x04garbage" * 20),
    "checksum": Message(MessageHeader(episode_id(1), 7), episodes.to_bytes(episode_of(episode_id(1)))),
    "provenance.origin says": message_of(episode_id(1), episodes.to_bytes(episode_of(episode_id(2)))),
    "this learner belongs to run night-1": message(episode_id(1, run="night-2")),
    "another episode is stored under this ID": message(episode_id(0), rewards=np.zeros(6, np.float32)),
    "actions has no steps": message(episode_id(1), actions=np.float32(3)),
}


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_episode_is_rejected_and_named_and_the_stream_lives_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    inbox = open_inbox(tmp_path)
    inbox.receive(message(episode_id(0)))
    for _ in range(2):  # sent again, it is rejected again
        with caplog.at_level(logging.WARNING):
            ack = inbox.receive(BAD[reason])
        assert ack.outcome == "rejected"
        assert f"episode {BAD[reason].header.episode_id.number} of actor arm" in ack.reason
        assert re.search(reason, ack.reason)
        assert ack.reason in caplog.text
    assert inbox.receive(message(episode_id(9))).outcome == "accepted"
    assert set(contents(inbox)) == {episode_id(0), episode_id(9)}
    assert inbox.metrics() == {
        "inbox/accepted": 2,
        "inbox/duplicate": 0,
        "inbox/rejected": 2,
        "inbox/deferred": 0,
        "inbox/stored": 2,
    }


def test_a_bad_first_episode_declares_nothing(tmp_path: Path) -> None:
    inbox = open_inbox(tmp_path)
    bad = message(episode_id(0), rewards=np.full(6, np.inf, np.float32))
    assert inbox.receive(bad).outcome == "rejected"
    assert inbox.receive(message(episode_id(1))).outcome == "accepted"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.integers(0, 3000), value=st.integers(0, 255), cut=st.integers(0, 3000), data=st.binary(max_size=9))
def test_arbitrary_bytes_do_not_stop_the_inbox(tmp_path: Path, where: int, value: int, cut: int, data: bytes) -> None:
    """Even with a matching checksum: stored episodes can be loaded, all others are rejected."""
    whole = bytearray(episodes.to_bytes(episode_of(episode_id(0))))
    whole[where % len(whole)] = value
    mangled = bytes(whole[: len(whole) - cut]) + data
    folder = tmp_path / f"{where}-{value}-{cut}-{data.hex()}"
    inbox = open_inbox(folder)
    ack = inbox.receive(message_of(episode_id(0), mangled))
    assert ack.outcome in ("accepted", "rejected")
    for stored in inbox.stored_after(0):
        stored.load()
    inbox.close()


def test_many_actors_at_once_are_stored_once_each(tmp_path: Path) -> None:
    inbox = open_inbox(tmp_path)
    outcomes: list[str] = []
    sent = [message(episode_id(number, actor=f"arm-{actor}")) for actor in range(4) for number in range(5)]

    def deliver() -> None:
        outcomes.extend(inbox.receive(each).outcome for each in sent)

    threads = [threading.Thread(target=deliver) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("accepted") == len(sent)
    assert outcomes.count("duplicate") == 3 * len(sent)
    assert contents(inbox) == {each.header.episode_id: each.payload for each in sent}
    assert [stored.position for stored in inbox.stored_after(0)] == list(range(1, len(sent) + 1))


def test_a_disk_that_fails_stores_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sync after the rename failed, so only a restarted learner can tell whether the file is there."""
    inbox = open_inbox(tmp_path)
    inbox.receive(message(episode_id(0)))

    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(files, "sync", fail)
        with pytest.raises(OSError, match="input/output"):
            inbox.receive(message(episode_id(1)))
    with pytest.raises(StreamError, match="restart the learner"):
        inbox.receive(message(episode_id(1)))
    inbox.close()
    again = open_inbox(tmp_path)
    assert again.receive(message(episode_id(1))).outcome == "duplicate"
    assert set(contents(again)) == {episode_id(0), episode_id(1)}


def test_a_full_disk_raises_instead_of_rejecting_the_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = open_inbox(tmp_path)
    inbox.receive(message(episode_id(0)))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as broken:
        broken.setattr("os.fsync", full)
        with pytest.raises(Exception, match="no space left on the disk"):
            inbox.receive(message(episode_id(1)))
    assert inbox.receive(message(episode_id(1))).outcome == "accepted"


def test_looking_at_a_live_inbox_does_not_hurt_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the writing and the renaming of an episode somebody lists and loads what is there."""
    inbox = open_inbox(tmp_path)
    inbox.receive(message(episode_id(0)))
    seen: list[int] = []
    write = files._write

    def look(*arguments: Any) -> None:
        write(*arguments)
        seen.append(len(list(EpisodeStore(tmp_path / "episodes"))))

    monkeypatch.setattr(files, "_write", look)
    assert inbox.receive(message(episode_id(1))).outcome == "accepted"
    assert inbox.receive(message(episode_id(2))).outcome == "accepted"
    assert seen == [1, 2]


def test_a_rename_that_fails_is_one_error_and_the_next_episode_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that has to grow can fail on a full disk."""
    inbox = open_inbox(tmp_path)

    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    inbox.receive(message(episode_id(0)))
    with monkeypatch.context() as broken:
        broken.setattr(Path, "replace", full)
        with pytest.raises(ProjectError, match="no space left on the disk"):
            inbox.receive(message(episode_id(1)))
    assert inbox.receive(message(episode_id(1))).outcome == "accepted"
    assert [stored.position for stored in inbox.stored_after(0)] == [1, 2]


class SlowDisk:
    """Syncs of the folder wait until `release` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.started, self.release = threading.Event(), threading.Event()
        monkeypatch.setattr(files, "sync", self._sync)

    def _sync(self, path: Path) -> None:
        self.count += 1
        self.started.set()
        assert self.release.wait(60)


def test_readers_do_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = open_inbox(tmp_path)
    inbox.receive(message(episode_id(0)))
    disk = SlowDisk(monkeypatch)
    writer = threading.Thread(target=lambda: inbox.receive(message(episode_id(1))))
    writer.start()
    assert disk.started.wait(60)
    # What is not on disk yet is not shown, and nothing here blocks.
    assert [stored.position for stored in inbox.stored_after(0)] == [1]
    assert not inbox.wait_for_episode(1, timeout=0)
    assert inbox.metrics()["inbox/stored"] == len(inbox) == 1
    assert inbox.transitions == 5
    disk.release.set()
    writer.join()
    assert inbox.wait_for_episode(1, timeout=0)


def test_episodes_that_arrive_during_a_sync_share_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = open_inbox(tmp_path)
    inbox.receive(message(episode_id(0)))
    disk = SlowDisk(monkeypatch)
    outcomes: list[str] = []
    sent = [message(episode_id(number)) for number in range(1, 9)]
    writers = [threading.Thread(target=lambda m=m: outcomes.append(inbox.receive(m).outcome)) for m in [*sent, sent[0]]]
    writers[0].start()
    assert disk.started.wait(60)
    for writer in writers[1:]:
        writer.start()
    while len(list((tmp_path / "episodes").glob("0*"))) < 9:  # all are renamed
        threading.Event().wait(0.01)
    assert not outcomes
    disk.release.set()
    for writer in writers:
        writer.join()
    assert sorted(outcomes) == ["accepted"] * 8 + ["duplicate"]
    assert disk.count == 2
    assert [stored.position for stored in inbox.stored_after(0)] == list(range(1, 10))


def test_episodes_are_deferred_while_there_is_no_room_and_duplicates_are_not(tmp_path: Path) -> None:
    inbox = open_inbox(tmp_path)
    inbox.receive(message(episode_id(0)))
    room = [False]
    inbox.accept_while(lambda: room[0])
    ack = inbox.receive(message(episode_id(1)))
    assert (ack.outcome, ack.reason) == ("deferred", NO_ROOM)
    assert inbox.receive(message(episode_id(0))).outcome == "duplicate"
    room[0] = True
    assert inbox.receive(message(episode_id(1))).outcome == "accepted"
    assert inbox.metrics()["inbox/deferred"] == 1


def test_a_restarted_learner_knows_the_transitions_without_opening_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_inbox(tmp_path) as inbox:
        for number in range(3):
            inbox.receive(message(episode_id(number)))
    monkeypatch.delattr("nightshift.data.mmap.view")
    again = open_inbox(tmp_path)
    assert [stored.transitions for stored in again.stored_after(0)] == [5, 5, 5]
    assert again.transitions == 15


def test_a_restarted_learner_syncs_the_folder_before_it_acknowledges_duplicates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_inbox(tmp_path).receive(message(episode_id(0)))
    synced: list[Path] = []
    monkeypatch.setattr(files, "sync", synced.append)
    monkeypatch.setattr("nightshift.stream.inbox.Claim", lambda folder, error: None)
    open_inbox(tmp_path)
    assert synced == [tmp_path / "episodes"]


@pytest.mark.slow
def test_a_hundred_thousand_episodes_are_known_without_asking_the_disk(tmp_path: Path) -> None:
    (tmp_path / "episodes").mkdir(parents=True)
    for number in range(100_000):
        header = MessageHeader(EpisodeId(RUN, "arm", 1, number), 0)
        (tmp_path / "episodes" / f"{number + 1:09d}.5.{header.key}.safetensors").touch()
    inbox = open_inbox(tmp_path)
    assert len(inbox) == 100_000
    (tmp_path / "episodes").rename(tmp_path / "elsewhere")
    assert episode_id(99_999) in inbox
    assert episode_id(100_000) not in inbox
    assert [stored.position for stored in inbox.stored_after(99_998)] == [99_999, 100_000]


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
    inbox.receive(message(episode_id(0)))
    inbox.close()
    with pytest.raises(DataError, match="holds episodes of run night-1, not of night-2"):
        Inbox(tmp_path, run="night-2")


def test_a_copied_file_is_noticed(tmp_path: Path) -> None:
    inbox = open_inbox(tmp_path)
    inbox.receive(message(episode_id(0)))
    inbox.close()
    path = inbox.stored_after(0)[0].path
    path.with_name(path.name.replace("000000001", "000000002", 1)).write_bytes(path.read_bytes())
    with pytest.raises(DataError, match="holds an episode twice"):
        open_inbox(tmp_path)
