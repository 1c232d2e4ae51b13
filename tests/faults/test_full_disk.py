"""A disk without space: one error for people wherever it is met, nothing is lost, and spools still drain."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from nightshift import files
from nightshift.data.episode_store import EpisodeStore
from nightshift.data.replay import TrajectoryReplay
from nightshift.errors import NightshiftError, ProjectError
from nightshift.stream.inbox import Inbox
from nightshift.stream.message import Ack, Message
from nightshift.stream.sender import Sender
from nightshift.stream.spool import Spool
from nightshift.stream.weights import WeightPublisher, Weights
from tests.data.examples import make
from tests.stream.parts import RUN, contents, episode_id, message, open_endpoint, open_spool


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on whatever needs space fails; renaming and deleting do not."""

    def full(*_: Any, **__: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    def make_folder(path: Path, *_: Any, exist_ok: bool = False, **__: Any) -> None:
        if not (exist_ok and path.is_dir()):
            full()

    for target, name in ((files, "_write"), (Path, "write_text"), (Path, "write_bytes"), (os, "link")):
        monkeypatch.setattr(target, name, full)
    monkeypatch.setattr(shutil, "copyfile", full)
    monkeypatch.setattr(Path, "mkdir", make_folder)


def save_checkpoint(folder: Path) -> Callable[[], object]:
    replay = TrajectoryReplay()
    replay.add_episodes([make()])
    return lambda: replay.save_checkpoint(folder / "checkpoint")


def load_checkpoint(folder: Path) -> Callable[[], object]:
    save_checkpoint(folder)()
    replay = TrajectoryReplay(auto_save_path=folder / "replay")
    return lambda: replay.load_checkpoint(folder / "checkpoint")


def write_replay(folder: Path) -> Callable[[], object]:
    replay = TrajectoryReplay(auto_save_path=folder / "replay")

    def write() -> None:
        replay.add_episodes([make()])
        replay.flush()

    return write


def put_into_store(folder: Path) -> Callable[[], object]:
    return lambda: EpisodeStore(folder / "store").put("a", make())


def put_into_spool(folder: Path) -> Callable[[], object]:
    spool = open_spool(folder / "spool")
    return lambda: spool.put(make())


def receive(folder: Path) -> Callable[[], object]:
    inbox = Inbox(folder / "inbox", run=RUN)
    return lambda: inbox.receive(message(episode_id(0)))


def open_inbox(folder: Path) -> Callable[[], object]:
    return lambda: Inbox(folder / "inbox", run=RUN)


def publish(folder: Path) -> Callable[[], object]:
    publisher = WeightPublisher(folder / "weights")
    return lambda: publisher.publish({"w": np.zeros(3)})


WRITERS = [
    save_checkpoint,
    load_checkpoint,
    write_replay,
    put_into_store,
    put_into_spool,
    receive,
    open_inbox,
    publish,
]


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_is_one_error_that_says_so(
    tmp_path: Path, writer: Callable[[Path], Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = writer(tmp_path)
    with monkeypatch.context() as full:
        fill_disk(full)
        with pytest.raises(NightshiftError, match=rf"no space left on the disk that holds {tmp_path}"):
            write()
    write()  # with space again, without a restart


class Learner:
    """A link to a learner that rejects the second episode it gets."""

    def __init__(self) -> None:
        self.received: list[Message] = []

    def send(self, messages: Iterable[Message]) -> Iterator[Ack]:
        for each in messages:
            self.received.append(each)
            is_second = len(self.received) == 2
            yield Ack(each.header, "rejected", "not finite") if is_second else Ack(each.header, "accepted")

    def weights(self, newer_than: int) -> Weights | None:
        return None

    def close(self) -> None:
        pass


def test_an_actor_that_starts_on_a_full_disk_sends_what_is_in_its_spool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with open_spool(tmp_path) as spool:
        made = [spool.put(make(seed=seed)) for seed in range(4)]
    learner = Learner()
    with monkeypatch.context() as full, caplog.at_level(logging.ERROR):
        fill_disk(full)
        with open_spool(tmp_path) as spool, Sender(spool, learner):
            with pytest.raises(ProjectError, match="no space left"):
                spool.put(make(seed=4))
            spool.wait_until_empty(timeout=60)
    assert [each.header.episode_id for each in learner.received] == made
    assert "not finite" in caplog.text
    assert [path.name for path in (tmp_path / "waiting").glob("*.safetensors")] == [
        f"{learner.received[1].header.key}.safetensors"
    ]
    with open_spool(tmp_path) as spool:  # what was rejected and had no place is sent again
        assert [each.header.episode_id for each in spool.unacknowledged()] == made[1:2]


def test_an_episode_that_found_the_learners_disk_full_arrives_when_it_has_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_endpoint(tmp_path) as endpoint, open_spool(tmp_path / "spool") as spool:
        made = spool.put(make())
        with monkeypatch.context() as full:
            fill_disk(full)
            with pytest.raises(ProjectError, match="no space left on the disk"):
                endpoint.inbox.receive(next(spool.unacknowledged()))
        endpoint.inbox.receive(next(spool.unacknowledged()))
        assert set(contents(endpoint.inbox)) == {made}


def test_a_spool_that_could_not_be_written_keeps_no_part_of_an_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Spool(tmp_path, run=RUN, actor="arm") as spool:
        with monkeypatch.context() as full:
            fill_disk(full)
            with pytest.raises(ProjectError):
                spool.put(make(seed=1))
        made = spool.put(make(seed=2))
        assert [each.header.episode_id for each in spool.unacknowledged()] == [made]
        assert not list(tmp_path.rglob("*.partial-*"))
