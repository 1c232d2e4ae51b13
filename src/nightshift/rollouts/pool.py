"""Rollouts on Ray actors.

    stage (driver)                       workers (Ray actors, one simulator process each)
    ──────────────                       ───────────────────────────────────────────────
    run(requests, policy) ── put once ──▶ object store ──▶ read once by every worker, for each policy
      │  one request per idle worker ───▶ Worker.run(request) ──▶ episodes
      │◀─ ray.wait: first done ──────────┘
      │     yields (index, episodes), gives that worker the next request
      │─ heartbeat counter? ────────────▶ Worker.heartbeats(), on a thread beside run's
      │◀─ a count that grows ────────────┘
      ├─ a worker that died, raised or makes no progress is replaced and its request is played
      │  again: the answer depends on the request alone, so it is the same
      └─ a straggler, a request that takes much longer than the others did, is played a second
         time by an idle worker: the first answer counts, and the other worker is ended

The driver waits for workers only, and for no stuck or slow worker while another could play. Workers wait for nothing.
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
from nightshift.cluster.capacity import Capacity
from nightshift.cluster.connection import start_ray
from nightshift.cluster.heartbeat import HEARTBEAT_GROUP, TIMEOUT_SECONDS
from nightshift.cluster.object_store import ObjectStoreWeights
from nightshift.errors import NightshiftError
from nightshift.policies.snapshot import PolicySnapshot
from nightshift.rollouts.base import MakeFleet
from nightshift.rollouts.retries import Retries
from nightshift.rollouts.stragglers import GRACE_SECONDS, Attempt, StragglerDetector
from nightshift.rollouts.worker import TRANSFER, Worker
from nightshift.telemetry.stopwatch import Stopwatch
from nightshift.types import RolloutRequest, Trajectory

_WAIT_SECONDS = 0.5


class RayPool:
    def __init__(
        self,
        workers: int,
        env: config.Env,
        *,
        make_fleet: MakeFleet | None = None,
        timeout: float = TIMEOUT_SECONDS,
        grace: float = GRACE_SECONDS,
    ) -> None:
        """A worker without progress for `timeout` seconds is stuck; a request is no straggler for `grace` seconds."""
        start_ray(workers)
        self.capacity = Capacity(workers)
        self._timeout = timeout
        make_fleet_reference = ray.put(make_fleet or envs.portable_fleets(env))  # sent to every node once
        driver = version_check.versions(env.suite)
        # A group of one thread each: `run` keeps to its own, since a GL context belongs to the thread that made it.
        actor = ray.remote(num_cpus=1, concurrency_groups={HEARTBEAT_GROUP: 1})(Worker)
        self._start_worker: Callable[[], Any] = lambda: actor.remote(env, make_fleet_reference, driver)
        self._idle: deque[Any] = deque()
        self._stragglers = StragglerDetector(grace)
        self._sent: PolicySnapshot | None = None
        self._stopwatch = Stopwatch()

    @property
    def workers(self) -> int:
        """As many as were asked for, or as the cluster had CPUs for when last looked at."""
        return self.capacity.workers

    def run(
        self, requests: Sequence[RolloutRequest], policy: PolicySnapshot | None = None
    ) -> Iterator[tuple[int, list[Trajectory]]]:
        sent = self._send(policy)
        retries = Retries(requests)
        waiting = deque(range(len(requests)))
        running: dict[Any, Attempt] = {}
        try:
            while waiting or running:
                workers = self.capacity.available_workers()
                while waiting and len(running) < workers:
                    self._begin(waiting.popleft(), requests, sent, running)
                for index, trajectories in self._finished(running, retries):
                    if trajectories is None:
                        waiting.appendleft(index)
                    else:
                        yield index, trajectories
                if not waiting and len(running) < workers and (straggler := self._straggler(running)) is not None:
                    self._begin(straggler, requests, sent, running)
        finally:
            # A consumer that stops early leaves workers busy: end them, the next `run` starts new ones.
            for attempt in running.values():
                ray.kill(attempt.actor)

    def spent(self) -> Mapping[str, float]:
        return dict(self._stopwatch.seconds)

    def close(self) -> None:
        for actor in self._idle:
            ray.kill(actor)
        self._idle.clear()
        self._sent = None
        if ray.is_initialized():
            self.capacity.release()
        ray.shutdown()

    def _begin(
        self, index: int, requests: Sequence[RolloutRequest], sent: PolicySnapshot | None, running: dict[Any, Attempt]
    ) -> None:
        was_idle = bool(self._idle)
        attempt = Attempt(index, self._idle.popleft() if was_idle else self._start_worker(), was_idle=was_idle)
        running[attempt.actor.run.remote(requests[index], sent)] = attempt

    def _send(self, policy: PolicySnapshot | None) -> PolicySnapshot | None:
        """The policy as workers get it: its weights are in the object store, and those of the one before are freed."""
        if policy is None:
            return None
        if self._sent is None or self._sent.token != policy.token:
            self._sent = None
            with self._stopwatch.timing(TRANSFER):
                self._sent = replace(policy, weights=ObjectStoreWeights.of(policy.weights))
        return self._sent

    def _finished(self, running: dict[Any, Attempt], retries: Retries) -> Iterator[tuple[int, list[Trajectory] | None]]:
        """Requests that no worker plays any more: with their episodes, or None if they must be played again.

        An answer, or giving up, ends every attempt at the request; after a failure another attempt goes on.
        """
        for future in self._ended(running):
            if future not in running:
                continue  # another attempt at the same request was first
            attempt = running.pop(future)
            others = [other for other in running if running[other].index == attempt.index]
            try:
                trajectories: list[Trajectory] | None = self._answer(future, attempt)
            except _WorkerFailure as failure:
                ray.kill(attempt.actor)
                if others:
                    continue
                trajectories = self._retry(attempt, failure, retries)
            for other in others:
                ray.kill(running.pop(other).actor)
            yield attempt.index, trajectories

    def _retry(self, attempt: Attempt, failure: _WorkerFailure, retries: Retries) -> list[Trajectory] | None:
        if failure.process_died and attempt.may_have_been_dead:
            return None  # before it got the request, which then has not failed
        return retries.record(attempt.index, str(failure), process_died=failure.process_died)

    def _ended(self, running: Mapping[Any, Attempt]) -> list[Any]:
        """The attempts that are done or failed, and those that are stuck."""
        done, busy = ray.wait(list(running), timeout=_WAIT_SECONDS)
        return [*done, *(future for future in busy if running[future].is_stuck(self._timeout))]

    def _answer(self, future: Any, attempt: Attempt) -> list[Trajectory]:
        """The episodes; the worker is idle again. An error meant for people is raised as it was in the worker."""
        try:
            with self._stopwatch.timing(TRANSFER):
                answer: tuple[list[Trajectory], Mapping[str, float]] = ray.get(future, timeout=0)
        except GetTimeoutError:
            raise _WorkerFailure(f"no step for {self._timeout:.0f} s") from None
        except RayTaskError as error:
            if not isinstance(error.cause, NightshiftError):
                raise _WorkerFailure(repr(error.cause)) from error
            self._idle.append(attempt.actor)
            raise error.cause from None
        except RayError as error:  # its process or its node died, or its answer is lost
            raise _WorkerFailure("its process died", process_died=True) from error
        trajectories, spent = answer
        self._idle.append(attempt.actor)
        self._stragglers.record(attempt.seconds)
        self._stopwatch.add(spent)
        return trajectories

    def _straggler(self, running: Mapping[Any, Attempt]) -> int | None:
        """The request to play a second time, if there is one and no running attempt is done."""
        if not running or ray.wait(list(running), timeout=0)[0]:
            return None
        return self._stragglers.slowest([(attempt.index, attempt.seconds) for attempt in running.values()])


class _WorkerFailure(Exception):
    """A worker that cannot go on, and why."""

    def __init__(self, why: str, *, process_died: bool = False) -> None:
        super().__init__(why)
        self.process_died = process_died
