"""Rollouts without Ray, behind the interface of its pool: in this process, which a simulator that segfaults ends too;
demos in processes of their own where there are several threads (players.py)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from nightshift import config, envs
from nightshift.policies.snapshot import PolicySnapshot
from nightshift.rollouts.base import MakeFleet
from nightshift.rollouts.engine import ONE_AT_A_TIME, Answer, Engine, EngineSettings
from nightshift.rollouts.players import ExpertPlayers
from nightshift.rollouts.retries import Retries
from nightshift.telemetry.stopwatch import Stopwatch
from nightshift.types import RolloutRequest, Trajectory


class LocalPool:
    def __init__(
        self,
        env: config.Env,
        settings: EngineSettings = ONE_AT_A_TIME,
        *,
        make_fleet: MakeFleet = envs.make_fleet,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_step`: as of `Engine`."""
        self._engine = Engine(env, settings, make_fleet, on_step)
        has_threads = settings.threads > 1 and settings.requests_at_once > 1
        self._players = ExpertPlayers(env, settings, make_fleet) if has_threads else None
        # A GL context belongs to one thread, and a stage may call `run` from several (rollouts/playing.py).
        self._thread = ThreadPoolExecutor(1)

    def run(
        self, requests: Sequence[RolloutRequest], policy: PolicySnapshot | None = None
    ) -> Iterator[tuple[int, list[Trajectory]]]:
        if self._players is not None and all(request.controller == "expert" for request in requests):
            return self._players.run(requests)
        return self._run_here(requests, policy)

    def _run_here(
        self, requests: Sequence[RolloutRequest], policy: PolicySnapshot | None
    ) -> Iterator[tuple[int, list[Trajectory]]]:
        retries = Retries(requests)
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
        for part in (self._engine, self._players):
            if part is not None:
                total.add(part.stopwatch.seconds)
        return dict(total.seconds)

    @property
    def workers(self) -> int:
        return 1

    def close(self) -> None:
        self._thread.submit(self._engine.close).result()
        self._thread.shutdown()
