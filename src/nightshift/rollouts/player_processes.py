"""Processes of this machine that play requests, each with an engine of its own; no Ray is needed.

    run(requests, policy)               processes
    ─────────────────────               ─────────
      │  a bundle of requests to each ─▶ engine.play ─▶ answers
      │◀─ those of a turn, and at last the end of the bundle
      │  sends the next bundle, then yields the episodes
      └─ a process that died, or makes no step for minutes, is replaced; what it has not answered is played again

An episode depends on its request and the policy alone, so it is the same as one that is played in this process.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import ClassVar, NamedTuple

from nightshift import config, spawning
from nightshift.cluster.timeout import TIMEOUT_SECONDS
from nightshift.errors import NightshiftError
from nightshift.policies.snapshot import PolicySnapshot
from nightshift.rollouts.base import MakeFleet
from nightshift.rollouts.engine import Answer, Engine, EngineSettings
from nightshift.rollouts.retries import Retries
from nightshift.telemetry.stopwatch import Stopwatch
from nightshift.types import RolloutRequest, Trajectory

_SECONDS_BETWEEN_MESSAGES = 1.0

Bundle = tuple[int, ...]
"""The numbers of requests that a process gets together."""


class Waiting(ABC):
    """Bundles that nobody plays yet."""

    @abstractmethod
    def __bool__(self) -> bool: ...

    @abstractmethod
    def take(self, task: str) -> Bundle:
        """The next one of a process whose last request was of `task`."""

    @abstractmethod
    def put_back(self, bundle: Bundle) -> None:
        """To be taken before others."""


class _Work(NamedTuple):
    """What a process gets."""

    requests: Sequence[RolloutRequest]
    policy: PolicySnapshot | None
    """None: that of the work before, if there was one."""


class _Answers(NamedTuple):
    """What a process sends back. The numbers of answers are positions in the bundle."""

    answers: Sequence[Answer]
    spent: Mapping[str, float]
    """Seconds by activity (engine.py)."""
    ends: bool
    """Whether these are the last ones of the bundle."""


class _Lost(NamedTuple):
    """Why a process sends no answers any more."""

    error: str
    process_died: bool = False


@dataclass
class _Player:
    process: BaseProcess
    connection: Connection
    task: str = ""
    """Of its last request."""
    policy: str = ""
    frozen: str = ""
    """The tokens of the policy that it has and of its frozen weights; empty before it gets one."""


@dataclass
class _Playing:
    player: _Player
    unanswered: dict[int, int]
    """The numbers of requests by their position in the bundle."""
    progressed: float
    """When its process was last known to make a step."""


class PlayerProcesses(ABC):
    """At most `count` processes for a run, which start when they are needed."""

    keeps_simulators: ClassVar[bool]
    """Whether a process keeps the simulators of all tasks that it has played, and lives as long as this object.
    Otherwise it has those of one task at a time, and ends with the call of `run`."""
    remedy: ClassVar[str]
    """As of `Retries`."""

    def __init__(
        self,
        env: config.Env,
        settings: EngineSettings,
        make_fleet: MakeFleet,
        *,
        count: int,
        timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        """`make_fleet` is sent to the processes, so it is a function of a module or another object that pickles.

        `timeout`: seconds without a step after which a process counts as stuck.
        """
        self.stopwatch = Stopwatch()
        self.count = count
        self._timeout = timeout
        own = self._engine_settings(settings)
        self._requests_at_once = own.requests_at_once
        self._arguments = env, own, make_fleet, self.keeps_simulators
        self._idle: list[_Player] = []

    def _engine_settings(self, settings: EngineSettings) -> EngineSettings:
        """Of each process."""
        return settings

    @abstractmethod
    def _waiting(self, requests: Sequence[RolloutRequest]) -> Waiting: ...

    def run(
        self, requests: Sequence[RolloutRequest], policy: PolicySnapshot | None = None
    ) -> Generator[tuple[int, list[Trajectory]], None, None]:
        """As of `Pool`."""
        retries = Retries(requests, remedy=self.remedy)
        waiting = self._waiting(requests)
        playing: dict[Connection, _Playing] = {}
        try:
            self._begin(requests, policy, waiting, playing)
            while playing:
                answered = list(self._answered(playing, waiting, retries))
                for index, trajectories in answered:
                    if trajectories is None:
                        waiting.put_back((index,))
                self._begin(requests, policy, waiting, playing)
                yield from ((index, found) for index, found in answered if found is not None)
        finally:
            for one in playing.values():
                _end(one.player)
            self._end_idle(self.count if self.keeps_simulators else 0)

    def close(self) -> None:
        self._end_idle(0)

    def _end_idle(self, kept: int) -> None:
        """Two runs that take turns leave more than one of them needs."""
        while len(self._idle) > kept:
            _end(self._idle.pop())

    def _begin(
        self,
        requests: Sequence[RolloutRequest],
        policy: PolicySnapshot | None,
        waiting: Waiting,
        playing: dict[Connection, _Playing],
    ) -> None:
        while waiting and len(playing) < self.count:
            player = self._idle_one() or self._started()
            bundle = waiting.take(player.task)
            asked = [requests[index] for index in bundle]
            player.task = asked[-1].task
            playing[player.connection] = _Playing(player, dict(enumerate(bundle)), progressed=time.monotonic())
            with contextlib.suppress(OSError):  # it died: there is an end of file to receive
                player.connection.send(_Work(asked, _not_there_yet(policy, player)))

    def _answered(
        self, playing: dict[Connection, _Playing], waiting: Waiting, retries: Retries
    ) -> Iterator[tuple[int, list[Trajectory] | None]]:
        """Requests with their episodes, or None if they are to be played again, after waiting for a process."""
        for one, received in self._received(playing):
            if isinstance(received, _Lost):
                del playing[one.player.connection]
                _end(one.player)
                yield from self._after_loss(list(one.unanswered.values()), received, waiting, retries)
                continue
            self.stopwatch.add(received.spent)
            for position, trajectories, error in received.answers:
                index = one.unanswered.pop(position)
                yield index, retries.record(index, error) if trajectories is None else trajectories
            if received.ends:
                del playing[one.player.connection]
                self._idle.append(one.player)

    def _after_loss(
        self, indices: Sequence[int], lost: _Lost, waiting: Waiting, retries: Retries
    ) -> Iterator[tuple[int, list[Trajectory] | None]]:
        """Of several requests that were played side by side, any may have failed: each is played by itself."""
        begun, not_begun = indices[: self._requests_at_once], tuple(indices[self._requests_at_once :])
        if not_begun:
            waiting.put_back(not_begun)
        if len(begun) == 1:
            yield begun[0], retries.record(begun[0], lost.error, process_died=lost.process_died)
            return
        yield from ((index, None) for index in begun)

    def _received(self, playing: Mapping[Connection, _Playing]) -> list[tuple[_Playing, _Answers | _Lost]]:
        received: list[tuple[_Playing, _Answers | _Lost]] = []
        sent = wait(list(playing), self._timeout)
        for connection, one in playing.items():
            if connection in sent:
                one.progressed = time.monotonic()
                if (message := _message(one.player)) is not None:
                    received.append((one, message))
            elif time.monotonic() - one.progressed > self._timeout:
                received.append((one, _Lost(f"its process made no step for {self._timeout:g} s")))
        return received

    def _idle_one(self) -> _Player | None:
        """That lives: one may have died since it played. Another run may take the last one at the same time."""
        with contextlib.suppress(IndexError):
            while True:
                player = self._idle.pop()
                if player.process.is_alive():
                    return player
                _end(player)
        return None

    def _started(self) -> _Player:
        ours, theirs = spawning.context().Pipe()
        process = spawning.process(_play_bundles, theirs, *self._arguments)
        theirs.close()  # else its end would not be noticed
        return _Player(process, ours)


def _not_there_yet(policy: PolicySnapshot | None, player: _Player) -> PolicySnapshot | None:
    """What of the policy has to be sent to this process, which has it afterwards."""
    if policy is None or policy.token == player.policy:
        return None
    player.policy = policy.token
    if policy.frozen is None:
        player.frozen = ""
        return policy
    has_frozen, player.frozen = player.frozen == policy.frozen.token, policy.frozen.token
    return replace(policy, frozen=replace(policy.frozen, weights={})) if has_frozen else policy


def _message(player: _Player) -> _Answers | _Lost | None:
    """None: a simulator has made a step. An error that is meant for people is raised as it was there."""
    try:
        received: _Answers | _Lost | NightshiftError | None = player.connection.recv()
    except (EOFError, OSError):
        return _Lost("its process died", process_died=True)
    if isinstance(received, NightshiftError):
        raise received
    return received


def _end(player: _Player) -> None:
    player.process.kill()  # it holds nothing that has to be saved
    player.process.join()
    player.connection.close()


def _play_bundles(
    connection: Connection, env: config.Env, settings: EngineSettings, make_fleet: MakeFleet, keeps_simulators: bool
) -> None:
    """For as long as the process lives."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    sender = _Sender(connection)
    policy, task, engine = None, "", None
    while True:
        work: _Work = connection.recv()
        sender.begin()
        policy = work.policy or policy
        try:
            if engine is not None and not keeps_simulators and work.requests[0].task != task:
                engine.close()
                engine = None
            engine = engine or Engine(env, settings, make_fleet, sender.step)
            task = work.requests[0].task
            _play(engine, work.requests, policy, sender)
        except NightshiftError as error:
            sender.send(error)
        except Exception as error:
            sender.send(_Lost(repr(error)))
            raise


def _play(engine: Engine, requests: Sequence[RolloutRequest], policy: PolicySnapshot | None, sender: _Sender) -> None:
    engine.stopwatch = Stopwatch()
    for answers in engine.play(deque(enumerate(requests)), policy):
        if answers:
            spent, engine.stopwatch = engine.stopwatch, Stopwatch()
            sender.send(_Answers(answers, dict(spent.seconds), ends=False))
    sender.send(_Answers([], dict(engine.stopwatch.seconds), ends=True))


class _Sender:
    """Sends from several threads, and that a simulator has made a step, but not every one."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._stepped = 0.0

    def begin(self) -> None:
        """A bundle: the parent knows that it has."""
        self._stepped = time.monotonic()

    def send(self, message: _Answers | _Lost | NightshiftError | None) -> None:
        with self._lock:
            self._connection.send(message)

    def step(self) -> None:
        if time.monotonic() - self._stepped > _SECONDS_BETWEEN_MESSAGES:
            self._stepped = time.monotonic()
            self.send(None)
