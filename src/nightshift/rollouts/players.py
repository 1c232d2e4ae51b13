"""Processes that play whole requests of the scripted expert, in place of the engine's threads, and draw nothing.

The expert decides before every step, and takes as long as the step itself. With threads all simulators would wait for
the slowest decision, step by step; a process that plays a request by itself waits for nobody. Images are drawn by one
process from the recorded states (local.py): many processes that draw on one GPU wait for each other. A policy decides
in batches on one GPU, so it is better off with threads.

    run(requests)                       processes, an engine each, one request at a time
    ─────────────                       ────────────────────────────────────────────────
      │  a request to each ────────────▶ engine.play ──▶ episodes
      │◀─ the first that is done ────────┘
      │  sends the next request, then yields the episodes
      └─ a process that died, or makes no step for minutes, is replaced, and its request is played again

A process keeps the simulators of one task, which take a second to build, and gets its requests while there are any.
An episode depends on its request alone: it is the same, bit for bit, as one of the engine's threads.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import NamedTuple

from nightshift import config, spawning
from nightshift.cluster.timeout import TIMEOUT_SECONDS
from nightshift.errors import NightshiftError
from nightshift.rollouts.base import MakeFleet
from nightshift.rollouts.engine import ONE_AT_A_TIME, Answer, Engine, EngineSettings
from nightshift.rollouts.retries import Retries
from nightshift.telemetry.stopwatch import Stopwatch
from nightshift.types import RolloutRequest, Trajectory

_SECONDS_BETWEEN_MESSAGES = 1.0
_REMEDY = "set machine.threads to 1 in params.yaml to see its output; if memory ran out, lower machine.threads"


class _Played(NamedTuple):
    """What a process sends back."""

    answer: Answer
    spent: Mapping[str, float]
    """Seconds by activity (engine.py)."""


class _Lost(NamedTuple):
    """Why a process sent no episodes."""

    error: str
    process_died: bool = False


class _Player(NamedTuple):
    process: BaseProcess
    connection: Connection
    task: str = ""
    """Of its last request."""


@dataclass
class _Playing:
    player: _Player
    index: int
    """Of the request."""
    progressed: float
    """When its process was last known to make a step."""


class _Waiting:
    """The numbers of requests that nobody plays yet, by task."""

    def __init__(self, requests: Sequence[RolloutRequest]) -> None:
        self._tasks = [request.task for request in requests]
        self._numbers: dict[str, deque[int]] = {task: deque() for task in self._tasks}
        for number, task in enumerate(self._tasks):
            self._numbers[task].append(number)

    def __bool__(self) -> bool:
        return any(self._numbers.values())

    def take(self, task: str) -> int:
        """One of this task, or of the task that has most."""
        numbers = self._numbers.get(task) or max(self._numbers.values(), key=len)
        return numbers.popleft()

    def put_back(self, number: int) -> None:
        self._numbers[self._tasks[number]].appendleft(number)


class ExpertPlayers:
    """As many processes as the engine would have threads; they live as long as a call of `run`."""

    def __init__(
        self, env: config.Env, settings: EngineSettings, make_fleet: MakeFleet, *, timeout: float = TIMEOUT_SECONDS
    ) -> None:
        """`make_fleet` is sent to the processes, so it is a function of a module or another object that pickles.

        `timeout`: seconds without a step after which a process counts as stuck.
        """
        self.stopwatch = Stopwatch()
        self._timeout = timeout
        self._count = settings.threads
        self._arguments = env, replace(ONE_AT_A_TIME, page=settings.page, draw=False), make_fleet

    def run(self, requests: Sequence[RolloutRequest]) -> Generator[tuple[int, list[Trajectory]], None, None]:
        retries = Retries(requests, remedy=_REMEDY)
        waiting = _Waiting(requests)
        idle: list[_Player] = []
        playing: dict[Connection, _Playing] = {}
        try:
            while len(idle) < min(self._count, len(requests)):
                idle.append(self._started())
            _begin(requests, waiting, idle, playing)
            while playing:
                answered = []
                for one, played in self._ended(playing):
                    del playing[one.player.connection]
                    idle.append(one.player if isinstance(played, _Played) else self._replaced(one.player))
                    answered.append((one.index, self._trajectories(one.index, played, retries)))
                for index, trajectories in answered:
                    if trajectories is None:
                        waiting.put_back(index)
                _begin(requests, waiting, idle, playing)
                yield from ((index, found) for index, found in answered if found is not None)
        finally:
            for player in [*idle, *(one.player for one in playing.values())]:
                _end(player)

    def _ended(self, playing: Mapping[Connection, _Playing]) -> list[tuple[_Playing, _Played | _Lost]]:
        """The requests that were played or lost, after waiting for a process to send something."""
        ended: list[tuple[_Playing, _Played | _Lost]] = []
        sent = wait(list(playing), self._timeout)
        for connection, one in playing.items():
            if connection in sent:
                one.progressed = time.monotonic()
                if (received := _received(one.player)) is not None:
                    ended.append((one, received))
            elif time.monotonic() - one.progressed > self._timeout:
                ended.append((one, _Lost(f"its process made no step for {self._timeout:g} s")))
        return ended

    def _started(self) -> _Player:
        ours, theirs = spawning.context().Pipe()
        process = spawning.process(_play_requests, theirs, *self._arguments)
        theirs.close()  # else its end would not be noticed
        return _Player(process, ours)

    def _replaced(self, player: _Player) -> _Player:
        _end(player)
        return self._started()

    def _trajectories(self, index: int, played: _Played | _Lost, retries: Retries) -> list[Trajectory] | None:
        """None: the request is to be played again."""
        if isinstance(played, _Lost):
            return retries.record(index, played.error, process_died=played.process_died)
        self.stopwatch.add(played.spent)
        _, trajectories, error = played.answer
        return trajectories if trajectories is not None else retries.record(index, error)


def _begin(
    requests: Sequence[RolloutRequest],
    waiting: _Waiting,
    idle: list[_Player],
    playing: dict[Connection, _Playing],
) -> None:
    while waiting and idle:
        player = idle.pop()
        index = waiting.take(player.task)
        with contextlib.suppress(OSError):  # it died: there is an end of file to receive
            player.connection.send(requests[index])
        begun = player._replace(task=requests[index].task)
        playing[player.connection] = _Playing(begun, index, progressed=time.monotonic())


def _received(player: _Player) -> _Played | _Lost | None:
    """None: its simulator has made a step. An error that is meant for people is raised as it was there."""
    try:
        played: _Played | NightshiftError | None = player.connection.recv()
    except (EOFError, OSError):
        return _Lost("its process died", process_died=True)
    if isinstance(played, NightshiftError):
        raise played
    return played


def _end(player: _Player) -> None:
    player.process.kill()  # it holds nothing that has to be saved
    player.process.join()
    player.connection.close()


def _play_requests(connection: Connection, env: config.Env, settings: EngineSettings, make_fleet: MakeFleet) -> None:
    """For as long as the process lives, with the simulators of one task at a time: those of a suite take gigabytes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    task, engine = "", None
    while True:
        request: RolloutRequest = connection.recv()
        try:
            if engine is None or request.task != task:
                if engine is not None:
                    engine.close()
                task, engine = request.task, Engine(env, settings, make_fleet, _Steps(connection))
            connection.send(_played(engine, request))
        except NightshiftError as error:
            connection.send(error)


class _Steps:
    """Sends that the simulator has made a step, but not every one."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sent = time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() - self._sent > _SECONDS_BETWEEN_MESSAGES:
            self._sent = time.monotonic()
            self._connection.send(None)


def _played(engine: Engine, request: RolloutRequest) -> _Played:
    engine.stopwatch = Stopwatch()
    (answer,) = [answer for turn in engine.play(deque([(0, request)]), None) for answer in turn]
    return _Played(answer, dict(engine.stopwatch.seconds))
