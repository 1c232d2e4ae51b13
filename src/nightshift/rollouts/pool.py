"""Rollouts on Ray actors.

    stage (driver)                       workers (Ray actors, one simulator process each)
    ──────────────                       ───────────────────────────────────────────────
    run(requests, policy) ── put once ──▶ object store ──▶ read once by every worker, for each policy
      │  one request per idle worker ───▶ Worker.run(request) ──▶ episodes
      │◀─ ray.wait: whoever is done ─────┘
      │     yields (index, episodes), hands that worker the next request
      │─ how far are you? ──────────────▶ Worker.progress(), on a thread beside run's
      │◀─ a count that moves ────────────┘
      ├─ a worker that died, raised or stands still is replaced and its request is played
      │  again: the answer depends on the request alone, so it is the same
      └─ a request that takes much longer than others did is played a second time by a worker
         that has nothing else to do: the first answer counts, and who is still at it is ended

The driver waits for workers only, and for none that stands still or crawls while another could play; workers wait
for nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from nightshift import config, envs
from nightshift.cluster import version_check
from nightshift.cluster.connection import Room, start_ray
from nightshift.cluster.heartbeat import PATIENCE_SECONDS, WATCH
from nightshift.cluster.object_store import Stored
from nightshift.errors import NightshiftError
from nightshift.policies.snapshot import PolicySnapshot
from nightshift.rollouts.base import MakeFleet, Pool
from nightshift.rollouts.local import LocalPool
from nightshift.rollouts.retries import Setbacks
from nightshift.rollouts.stragglers import GRACE_SECONDS, Attempt, Pace
from nightshift.rollouts.worker import TRANSFER, Worker
from nightshift.telemetry.stopwatch import Stopwatch
from nightshift.types import RolloutRequest, Trajectory

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
        grace: float = GRACE_SECONDS,
    ) -> None:
        start_ray(workers)
        self.room = Room(workers)
        self._patience = patience
        # Once to every node: what a worker there builds its simulators from, and what it has to be like.
        luggage = ray.put(make_fleet or envs.portable_fleets(env))
        driver = version_check.versions(env.suite)
        # A group of one thread each: `run` keeps to its own, since a GL context belongs to the thread that made it.
        actor = ray.remote(num_cpus=1, concurrency_groups={WATCH: 1})(Worker)
        self._start: Callable[[], Any] = lambda: actor.remote(env, luggage, driver)
        self._idle: deque[Any] = deque()
        self._pace = Pace(grace)
        self._sent: PolicySnapshot | None = None
        self._watch = Stopwatch()

    @property
    def workers(self) -> int:
        """As many as were asked for, or as the cluster had room for when it was last looked at."""
        return self.room.workers

    def run(
        self, requests: Sequence[RolloutRequest], policy: PolicySnapshot | None = None
    ) -> Iterator[tuple[int, list[Trajectory]]]:
        sent = self._send(policy)
        setbacks = Setbacks(requests)
        waiting = deque(range(len(requests)))
        running: dict[Any, Attempt] = {}
        try:
            while waiting or running:
                workers = self.room.look()
                while waiting and len(running) < workers:
                    self._begin(waiting.popleft(), requests, sent, running)
                self.room.ask_for_more()
                for index, trajectories in self._settled(running, setbacks):
                    if trajectories is None:
                        waiting.appendleft(index)
                    else:
                        yield index, trajectories
                if not waiting and len(running) < workers and (late := self._late(running)) is not None:
                    self._begin(late, requests, sent, running)
        finally:
            # A consumer that stops early leaves workers busy; fresh ones take their place when there is work again.
            for attempt in running.values():
                ray.kill(attempt.actor)

    def spent(self) -> Mapping[str, float]:
        return dict(self._watch.seconds)

    def close(self) -> None:
        for actor in self._idle:
            ray.kill(actor)
        self._idle.clear()
        self._sent = None
        ray.shutdown()

    def _begin(
        self, index: int, requests: Sequence[RolloutRequest], sent: PolicySnapshot | None, running: dict[Any, Attempt]
    ) -> None:
        was_idle = bool(self._idle)
        attempt = Attempt(index, self._idle.popleft() if was_idle else self._start(), was_idle=was_idle)
        running[attempt.actor.run.remote(requests[index], sent)] = attempt

    def _send(self, policy: PolicySnapshot | None) -> PolicySnapshot | None:
        """The policy as workers get it: its weights are in the object store, where those before it are let go."""
        if policy is None:
            return None
        if self._sent is None or self._sent.token != policy.token:
            self._sent = None
            with self._watch.timing(TRANSFER):
                self._sent = replace(policy, weights=Stored(policy.weights))
        return self._sent

    def _settled(
        self, running: dict[Any, Attempt], setbacks: Setbacks
    ) -> Iterator[tuple[int, list[Trajectory] | None]]:
        """Requests that nobody plays any more: with their episodes, or None if they must be played again.

        One that is answered, or given up, is so for all who play it; where one fails, the other goes on.
        """
        for future in self._ended(running):
            if future not in running:
                continue  # another was first
            attempt = running.pop(future)
            rivals = [rival for rival in running if running[rival].index == attempt.index]
            try:
                trajectories: list[Trajectory] | None = self._answer(future, attempt)
            except _Setback as setback:
                ray.kill(attempt.actor)
                if rivals:
                    continue
                trajectories = None if setback.is_blameless else setbacks.record(attempt.index, str(setback))
            for rival in rivals:
                ray.kill(running.pop(rival).actor)
            yield attempt.index, trajectories

    def _ended(self, running: Mapping[Any, Attempt]) -> list[Any]:
        """Those who are done, for better or worse, and those who will never be."""
        done, busy = ray.wait(list(running), timeout=_WAIT_SECONDS)
        return [*done, *(future for future in busy if running[future].is_stuck(self._patience))]

    def _answer(self, future: Any, attempt: Attempt) -> list[Trajectory]:
        """The episodes; the worker is idle again. What is meant for people is raised as it was in the worker."""
        try:
            with self._watch.timing(TRANSFER):
                answer: tuple[list[Trajectory], Mapping[str, float]] = ray.get(future, timeout=0)
        except GetTimeoutError:
            raise _Setback(f"no step for {self._patience:.0f} s") from None
        except RayTaskError as error:
            if not isinstance(error.cause, NightshiftError):
                raise _Setback(repr(error.cause)) from error
            self._idle.append(attempt.actor)
            raise error.cause from None
        except RayError as error:  # the process, its node or its answer is gone
            raise _Setback("its process died", is_blameless=attempt.may_have_come_too_late) from error
        trajectories, spent = answer
        self._idle.append(attempt.actor)
        self._pace.took(attempt.seconds)
        self._watch.add(spent)
        return trajectories

    def _late(self, running: Mapping[Any, Attempt]) -> int | None:
        """The request to play a second time, if there is one and none that runs is done."""
        if not running or ray.wait(list(running), timeout=0)[0]:
            return None
        return self._pace.late([(attempt.index, attempt.seconds) for attempt in running.values()])


class _Setback(Exception):
    """A worker that cannot go on, and why."""

    def __init__(self, why: str, *, is_blameless: bool = False) -> None:
        super().__init__(why)
        self.is_blameless = is_blameless
        """Whether it may have been dead before it was asked."""
