"""Rollouts without Ray, behind the interface of its pool: in this process, which a simulator that segfaults ends too,
or in others on this machine (players.py): policies in `workers` of them, demos in as many as there are threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import NamedTuple

from nightshift import config, envs
from nightshift.policies.snapshot import PolicySnapshot
from nightshift.rollouts.base import MakeFleet
from nightshift.rollouts.engine import ONE_AT_A_TIME, Answer, Engine, EngineSettings
from nightshift.rollouts.players import ExpertPlayers, PolicyPlayers
from nightshift.rollouts.retries import Retries
from nightshift.telemetry.stopwatch import Stopwatch
from nightshift.types import RolloutRequest, Trajectory

_REMEDY = "nightshift env check says what is missing here"


class _Drawing(NamedTuple):
    """A request whose images are being drawn."""

    number: int
    group: list[Trajectory]
    answer: Future[Answer]


class LocalPool:
    def __init__(
        self,
        env: config.Env,
        settings: EngineSettings = ONE_AT_A_TIME,
        *,
        workers: int = 0,
        make_fleet: MakeFleet = envs.make_fleet,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        """`workers`: processes in which policies play, with `settings` each; 0: they play in this one. `on_step`: as of
        `Engine`."""
        self._engine = Engine(env, settings, make_fleet, on_step)
        self._workers = max(workers, 1)
        self._draws = bool(env.cameras.names)
        side_by_side = workers > 1 or (settings.threads > 1 and settings.requests_at_once > 1)
        in_processes = side_by_side and (not self._draws or envs.suite(env.suite).redraws)
        threads = settings.threads * self._workers
        self._experts = ExpertPlayers(env, settings, make_fleet, count=threads) if in_processes else None
        self._policies = PolicyPlayers(env, settings, make_fleet, count=workers) if workers else None
        self._demos_at_once = settings.requests_at_once
        # A GL context belongs to one thread, and a stage may call `run` from several (rollouts/playing.py).
        self._thread = ThreadPoolExecutor(1)

    def run(
        self, requests: Sequence[RolloutRequest], policy: PolicySnapshot | None = None
    ) -> Iterator[tuple[int, list[Trajectory]]]:
        if policy is not None and self._policies is not None and not any(map(_needs_this_process, requests)):
            return self._policies.run(requests, policy)
        if self._experts is None or policy is not None or not all(map(_is_demo, requests)):
            return self._run_here(requests, policy)
        return self._run_demos(requests, self._experts)

    def _run_demos(
        self, requests: Sequence[RolloutRequest], players: ExpertPlayers
    ) -> Iterator[tuple[int, list[Trajectory]]]:
        """Played by processes. Where there are cameras, this one's thread draws them while the next ones are played."""
        if not self._draws:
            yield from players.run(requests)
            return
        retries = Retries(requests, remedy=_REMEDY)
        drawing: deque[_Drawing] = deque()
        try:
            with closing(players.run(requests)) as playing:
                for index, group in playing:
                    drawing.append(self._begun_drawing(index, group))
                    while drawing and (drawing[0].answer.done() or len(drawing) > self._demos_at_once):
                        yield self._drawn(drawing.popleft(), retries)
            while drawing:
                yield self._drawn(drawing.popleft(), retries)
        finally:
            for one in drawing:
                one.answer.cancel()

    def _begun_drawing(self, index: int, group: list[Trajectory]) -> _Drawing:
        return _Drawing(index, group, self._thread.submit(self._engine.redraw, index, group))

    def _drawn(self, drawing: _Drawing, retries: Retries) -> tuple[int, list[Trajectory]]:
        index, group, answer = drawing
        drawn = answer.result()
        while drawn.trajectories is None:
            lost = retries.record(index, drawn.error)
            drawn = Answer(index, lost) if lost is not None else self._begun_drawing(index, group).answer.result()
        return index, drawn.trajectories

    def _run_here(
        self, requests: Sequence[RolloutRequest], policy: PolicySnapshot | None
    ) -> Iterator[tuple[int, list[Trajectory]]]:
        retries = Retries(requests, remedy=_REMEDY)
        waiting = deque(enumerate(requests))
        turns = self._engine.play(waiting, policy)
        try:
            while (answers := self._next(turns)) is not None:
                for index, played, error in answers:
                    trajectories = retries.record(index, error) if played is None else played
                    if trajectories is None:
                        waiting.appendleft((index, requests[index]))
                    else:
                        yield index, trajectories
        finally:
            self._engine.let_go()
            self._thread.submit(turns.close).result()
            self._engine.close_experts()

    def _next(self, turns: Iterator[list[Answer]]) -> list[Answer] | None:
        """The answers of one turn; None if all is played."""
        self._engine.begin()  # another run of this pool may have let go since the last turn
        return self._thread.submit(next, turns, None).result()

    def spent(self) -> Mapping[str, float]:
        total = Stopwatch()
        for part in (self._engine, self._experts, self._policies):
            if part is not None:
                total.add(part.stopwatch.seconds)
        return dict(total.seconds)

    @property
    def workers(self) -> int:
        return self._workers

    def close(self) -> None:
        if self._policies is not None:
            self._policies.close()
        self._thread.submit(self._engine.close).result()
        self._thread.shutdown()


def _is_demo(request: RolloutRequest) -> bool:
    return request.controller == "expert" and not request.frames_every


def _needs_this_process(request: RolloutRequest) -> bool:
    """Sources of interventions are here, and the expert has processes of its own."""
    return request.interventions is not None or request.controller == "expert"
