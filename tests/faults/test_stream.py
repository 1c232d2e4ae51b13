"""Actors, their learner and the cable between them are killed for real, again and again, at random moments."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from nightshift.data import episode as episodes
from nightshift.data.episode import NO_POLICY
from nightshift.stream.inbox import Inbox
from nightshift.stream.message import MessageHeader
from nightshift.stream.weights import WEIGHTS, WeightPublisher
from tests.faults.stream_processes import actor, cable, episode, learner, play, publish_and_die
from tests.forks import fork
from tests.ports import free_ports
from tests.stream.parts import RUN, contents
from tests.waiting import SECONDS

ACTORS = ("left", "middle", "right")


class Processes:
    """The processes by name, each of which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.enough = folder / "enough"
        learner_port, cable_port = free_ports(2)
        self.roles: dict[str, tuple[Any, ...]] = {
            "learner": (learner, folder / "learner", learner_port),
            "cable": (cable, cable_port, learner_port),
            **{name: (actor, folder / name, cable_port, self.enough) for name in ACTORS},
        }
        self.running: dict[str, BaseProcess] = {}

    def start(self, name: str) -> None:
        self.running[name] = fork(play, self.folder / "log", *self.roles[name])

    def kill(self, name: str) -> None:
        self.running[name].kill()
        self.running[name].join()

    def finish(self) -> None:
        """Have the actors end when all that they put is acknowledged."""
        self.enough.touch()
        for name in ACTORS:
            self.running[name].join(SECONDS)
            assert self.running[name].exitcode == 0, (self.folder / "log").read_text()[-5000:]

    def close(self) -> None:
        for name in self.running:
            self.kill(name)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    for name in made.roles:
        (tmp_path / name).mkdir()
        made.start(name)
    yield made
    made.close()


def lines(path: Path) -> list[str]:
    """The complete lines of a file."""
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def stored_keys(folder: Path) -> list[str]:
    names = [path.stem for path in (folder / "learner" / "inbox" / "episodes").glob("*.safetensors")]
    return [name.split(".", 2)[2] for name in names]


def acknowledged(folder: Path) -> set[str]:
    return {line.split()[0] for name in ACTORS for line in lines(folder / name / "acks")}


def kill_at_random(processes: Processes, kills: int) -> None:
    """Kill random processes at random times; after each kill every acknowledged episode is stored exactly once."""
    for _ in range(kills):
        time.sleep(random.uniform(0.01, 0.25))
        victim = random.choice(["learner", "cable", *ACTORS])
        assert processes.running[victim].is_alive(), (processes.folder / "log").read_text()[-5000:]
        processes.kill(victim)
        promised = acknowledged(processes.folder)
        stored = stored_keys(processes.folder)
        assert promised <= set(stored)
        assert len(stored) == len(set(stored))
        time.sleep(random.uniform(0, 0.1))
        processes.start(victim)


def check(processes: Processes) -> None:
    processes.finish()
    processes.kill("learner")
    folder = processes.folder
    inbox = Inbox(folder / "learner" / "inbox", run=RUN)
    stored = contents(inbox)
    put = {line for name in ACTORS for line in lines(folder / name / "put")}
    assert put <= {episode_id.key for episode_id in stored}
    assert {MessageHeader.from_key(key).episode_id for key in acknowledged(folder)} == set(stored)
    assert not [path for name in ACTORS for path in (folder / name).glob("*/*.safetensors")]
    seeds = Counter[tuple[str, int]]()
    for episode_id, content in stored.items():
        arrived = episodes.from_bytes(content)
        name, seed = arrived.metadata["actor"], arrived.metadata["seed"]
        made = episode(name, seed)
        named = replace(made, provenance=replace(made.provenance, origin=episode_id.key))
        assert content == episodes.to_bytes(named)
        seeds[name, seed] += 1
    counts = {name: len(lines(folder / name / "put")) for name in ACTORS}
    assert set(seeds) == {(name, seed) for name in ACTORS for seed in range(counts[name])}
    versions = [int(line) for line in lines(folder / "learner" / "published")]
    assert versions == sorted(set(versions))
    announced = set(map(int, lines(folder / "learner" / "announced")))
    assert set(versions) <= announced
    for name in ACTORS:
        assert set(map(int, lines(folder / name / "acted"))) <= {NO_POLICY, *announced}
    inbox.close()


def test_what_is_stored_is_what_was_acknowledged_each_once_whichever_process_is_killed(processes: Processes) -> None:
    kill_at_random(processes, 30)
    check(processes)


def test_weights_that_were_being_published_leave_no_file_behind_wherever_their_learner_is_killed(
    tmp_path: Path,
) -> None:
    exits: list[int | None] = []
    versions: list[int] = []
    while not exits or exits[-1]:  # until an event is never reached
        process = fork(publish_and_die, tmp_path, len(exits) + 1)
        process.join()
        exits.append(process.exitcode)
        with WeightPublisher(tmp_path) as publisher:
            versions.append(publisher.version)
        assert {path.name for path in tmp_path.iterdir()} <= {"lock", WEIGHTS}
    assert exits[:-1] == [-signal.SIGKILL] * (len(exits) - 1)
    assert len(exits) >= 4
    assert versions == sorted(versions)
    assert versions[-1] > NO_POLICY


@pytest.mark.slow
def test_the_same_holds_over_hundreds_of_kills(processes: Processes) -> None:
    kill_at_random(processes, 200)
    check(processes)
