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
      └─ a process that died is replaced, and its request is played again

A process keeps the simulators of one task, which take a second to build, and gets its requests while there are any.
An episode depends on its request alone: it is the same, bit for bit, as one of the engine's threads.
"""

from __future__ import annotations

import contextlib
import signal
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import NamedTuple

from nightshift import config, spawning
from nightshift.errors import NightshiftError
from nightshift.rollouts.base import MakeFleet
from nightshift.rollouts.engine import ONE_AT_A_TIME, Answer, Engine, EngineSettings
from nightshift.rollouts.retries import Retries
from nightshift.telemetry.stopwatch import Stopwatch
from nightshift.types import RolloutRequest, Trajectory

_REMEDY = "set machine.threads to 1 in params.yaml to see its output; if memory ran out, lower machine.threads"


class _Played(NamedTuple):
    """What a process sends back."""

    answer: Answer
    spent: Mapping[str, float]
    """Seconds by activity (engine.py)."""


class _Player(NamedTuple):
    process: BaseProcess
    connection: Connection
    task: str = ""
    """Of its last request."""


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

    def __init__(self, env: config.Env, settings: EngineSettings, make_fleet: MakeFleet) -> None:
        """`make_fleet` is sent to the processes, so it is a function of a module or another object that pickles."""
        self.stopwatch = Stopwatch()
        self._count = settings.threads
        self._arguments = env, replace(ONE_AT_A_TIME, page=settings.page, draw=False), make_fleet

    def run(self, requests: Sequence[RolloutRequest]) -> Generator[tuple[int, list[Trajectory]], None, None]:
        retries = Retries(requests, remedy=_REMEDY)
        waiting = _Waiting(requests)
        idle: list[_Player] = []
        playing: dict[Connection, tuple[_Player, int]] = {}
        try:
            while len(idle) < min(self._count, len(requests)):
                idle.append(self._started())
            _begin(requests, waiting, idle, playing)
            while playing:
                answered = []
                ended = wait(list(playing))
                for player, index in [playing[connection] for connection in playing if connection in ended]:
                    played = _received(player)
                    del playing[player.connection]
                    idle.append(player if played is not None else self._replaced(player))
                    answered.append((index, self._trajectories(index, played, retries)))
                for index, trajectories in answered:
                    if trajectories is None:
                        waiting.put_back(index)
                _begin(requests, waiting, idle, playing)
                yield from ((index, found) for index, found in answered if found is not None)
        finally:
            for player in [*idle, *(player for player, _ in playing.values())]:
                _end(player)

    def _started(self) -> _Player:
        ours, theirs = spawning.context().Pipe()
        process = spawning.process(_play_requests, theirs, *self._arguments)
        theirs.close()  # else its end would not be noticed
        return _Player(process, ours)

    def _replaced(self, player: _Player) -> _Player:
        _end(player)
        return self._started()

    def _trajectories(self, index: int, played: _Played | None, retries: Retries) -> list[Trajectory] | None:
        """None: the request is to be played again."""
        if played is None:
            return retries.record(index, "its process died", process_died=True)
        self.stopwatch.add(played.spent)
        _, trajectories, error = played.answer
        return trajectories if trajectories is not None else retries.record(index, error)


def _begin(
    requests: Sequence[RolloutRequest],
    waiting: _Waiting,
    idle: list[_Player],
    playing: dict[Connection, tuple[_Player, int]],
) -> None:
    while waiting and idle:
        player = idle.pop()
        index = waiting.take(player.task)
        with contextlib.suppress(OSError):  # it died: there is an end of file to receive
            player.connection.send(requests[index])
        playing[player.connection] = player._replace(task=requests[index].task), index


def _received(player: _Player) -> _Played | None:
    """None if the process died. An error that is meant for people is raised as it was there."""
    try:
        played: _Played | NightshiftError = player.connection.recv()
    except (EOFError, OSError):
        return None
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
                task, engine = request.task, Engine(env, settings, make_fleet)
            connection.send(_played(engine, request))
        except NightshiftError as error:
            connection.send(error)


def _played(engine: Engine, request: RolloutRequest) -> _Played:
    engine.stopwatch = Stopwatch()
    (answer,) = [answer for turn in engine.play(deque([(0, request)]), None) for answer in turn]
    return _Played(answer, dict(engine.stopwatch.seconds))
