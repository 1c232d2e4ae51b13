"""Rollouts on Ray actors.

    stage (driver)                       workers (Ray actors, one simulator process each)
    ──────────────                       ───────────────────────────────────────────────
    run(requests, policy) ── put once ──▶ object store ──▶ read by every worker
      │  one request per idle worker ───▶ Worker.run(request) ──▶ episodes
      │◀─ ray.wait: whoever is done ─────┘
      │     yields (index, episodes), hands that worker the next request
      │─ how far are you? ──────────────▶ Worker.progress(), on a thread beside run's
      │◀─ a count that moves ────────────┘
      └─ a worker that died, raised or stands still is replaced and its request is played
         again: the answer depends on the request alone, so it is the same

The driver waits for workers only, and for none that stands still; workers wait for nobody.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from nightshift import config, envs
from nightshift.distributed import sameness
from nightshift.distributed.base import MakeFleet, PolicySnapshot, Pool
from nightshift.distributed.cluster import Room, start_ray
from nightshift.distributed.local import LocalPool
from nightshift.distributed.setbacks import Setbacks
from nightshift.distributed.worker import Worker
from nightshift.errors import NightshiftError
from nightshift.types import RolloutRequest, Trajectory

PATIENCE_SECONDS = 300.0
"""A worker that makes no step for this long hangs. Building and compiling a simulator takes a tenth of it."""
_WATCH = "watch"
_WAIT_SECONDS = 0.5


def open_pool(workers: int, env: config.Env) -> Pool:
    return RayPool(workers, env) if workers else LocalPool(env)


class RayPool:
    def __init__(
        self,
        workers: int,
        env: config.Env,
        *,
        make_fleet: MakeFleet | None = None,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        start_ray(workers)
        self.room = Room(workers)
        self._patience = patience
        # Once to every node: what a worker there builds its simulators from, and what it has to be like.
        luggage = ray.put(make_fleet or envs.portable_fleets(env))
        driver = sameness.versions(env.suite)
        # A group of one thread each: `run` keeps to its own, since a GL context belongs to the thread that made it.
        actor = ray.remote(num_cpus=1, concurrency_groups={_WATCH: 1})(Worker)
        self._start: Callable[[], Any] = lambda: actor.remote(env, luggage, driver)
        self._idle: deque[Any] = deque()

    @property
    def workers(self) -> int:
        """As many as were asked for, or as the cluster has room for now."""
        return self.room.workers()

    def run(
        self, requests: Sequence[RolloutRequest], policy: PolicySnapshot | None = None
    ) -> Iterator[tuple[int, list[Trajectory]]]:
        reference = ray.put(policy)
        setbacks = Setbacks(requests)
        waiting = deque(range(len(requests)))
        running: dict[Any, _Game] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.workers:
                    game = _Game(waiting.popleft(), self._idle.popleft() if self._idle else self._start())
                    running[game.actor.run.remote(requests[game.index], reference)] = game
                for future in self._ended(running):
                    game = running.pop(future)
                    try:
                        trajectories: list[Trajectory] | None = self._answer(future, game.actor)
                    except _Setback as setback:
                        ray.kill(game.actor)
                        trajectories = setbacks.record(game.index, str(setback))
                    if trajectories is None:
                        waiting.appendleft(game.index)
                    else:
                        yield game.index, trajectories
        finally:
            # A consumer that stops early leaves workers busy; fresh ones take their place when there is work again.
            for game in running.values():
                ray.kill(game.actor)

    def spent(self) -> Mapping[str, float]:
        """Of the workers that are idle: one that is busy, or died, does not tell."""
        total: Counter[str] = Counter()
        for answer in [actor.spent.remote() for actor in self._idle]:
            with contextlib.suppress(RayError):
                total.update(ray.get(answer))
        return total

    def close(self) -> None:
        for actor in self._idle:
            ray.kill(actor)
        self._idle.clear()
        ray.shutdown()

    def _ended(self, running: Mapping[Any, _Game]) -> list[Any]:
        """Those who are done, for better or worse, and those who will never be."""
        done, busy = ray.wait(list(running), timeout=_WAIT_SECONDS)
        return [*done, *(future for future in busy if running[future].is_stuck(self._patience))]

    def _answer(self, future: Any, actor: Any) -> list[Trajectory]:
        """The episodes; the worker is idle again. What is meant for people is raised as it was in the worker."""
        try:
            trajectories: list[Trajectory] = ray.get(future, timeout=0)
        except GetTimeoutError:
            raise _Setback(f"no step for {self._patience:.0f} s") from None
        except RayTaskError as error:
            if not isinstance(error.cause, NightshiftError):
                raise _Setback(repr(error.cause)) from error
            self._idle.append(actor)
            raise error.cause from None
        except RayError as error:  # the process, its node or its answer is gone
            raise _Setback("its process died") from error
        self._idle.append(actor)
        return trajectories


class _Setback(Exception):
    """A worker that cannot go on, and why."""


class _Game:
    """A request and the worker that plays it."""

    def __init__(self, index: int, actor: Any) -> None:
        self.index = index
        self.actor = actor
        self._count: int | None = None
        self._moved = time.monotonic()
        self._ask()

    def is_stuck(self, patience: float) -> bool:
        """Whether the worker stood still for too long. One that has yet to start has as long as any pool allows."""
        if ray.wait([self._question], timeout=0)[0]:
            self._listen(patience)
        allowed = max(patience, PATIENCE_SECONDS) if self._count is None else patience
        return time.monotonic() - self._moved > allowed

    def _ask(self) -> None:
        self._asked = time.monotonic()
        self._question = self.actor.progress.options(concurrency_group=_WATCH).remote()

    def _listen(self, patience: float) -> None:
        with contextlib.suppress(RayError):  # that the worker died is for the request itself to tell
            count = ray.get(self._question)
            if count != self._count:
                self._count, self._moved = count, time.monotonic()
            if time.monotonic() - self._asked > patience / 8:
                self._ask()
