"""Rollouts on Ray actors.

    stage (driver)                       workers (Ray actors, one process of simulators each)
    ──────────────                       ────────────────────────────────────────────────────
    run(requests, policy) ── put once ──▶ object store ──▶ read once by every worker, for each policy
      │  a bundle per idle worker ──────▶ Worker.run(bundle) ──▶ episodes
      │◀─ ray.wait: first done ──────────┘
      │     yields (index, episodes), gives that worker the next bundle
      │─ heartbeat counter? ────────────▶ Worker.heartbeats(), on a thread beside run's
      │◀─ a count that grows ────────────┘
      ├─ a worker that died or makes no progress is replaced and its requests are played again, and those
      │  whose simulator raised: the answer depends on the request alone, so it is the same
      └─ a straggler, a bundle that takes much longer than the others did, is played a second
         time by an idle worker: the first answer counts, and the other worker is ended

A bundle has as many requests as a worker plays at once, or fewer where all workers would not get one: one request by
default. The requests of a bundle that is lost are played one by one, so that the one that ends its process is found.

The driver waits for workers only, and for no stuck or slow worker while another could play. Workers wait for nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from nightshift import config, envs
from nightshift.cluster import version_check
from nightshift.cluster.capacity import Capacity
from nightshift.cluster.connection import start_ray, stop_ray
from nightshift.cluster.heartbeat import HEARTBEAT_GROUP
from nightshift.cluster.object_store import ObjectStoreWeights
from nightshift.cluster.timeout import TIMEOUT_SECONDS
from nightshift.errors import DeviceError, NightshiftError
from nightshift.policies.snapshot import PolicySnapshot, WeightArrays
from nightshift.rollouts.base import MakeFleet
from nightshift.rollouts.engine import ONE_AT_A_TIME, TRANSFER, Answer, EngineSettings
from nightshift.rollouts.retries import Retries
from nightshift.rollouts.stragglers import GRACE_SECONDS, Attempt, Bundle, StragglerDetector
from nightshift.rollouts.worker import Worker
from nightshift.telemetry.stopwatch import Stopwatch
from nightshift.types import RolloutRequest, Trajectory

_WAIT_SECONDS = 0.5


class RayPool:
    def __init__(
        self,
        workers: int,
        env: config.Env,
        settings: EngineSettings = ONE_AT_A_TIME,
        *,
        make_fleet: MakeFleet | None = None,
        timeout: float = TIMEOUT_SECONDS,
        grace: float = GRACE_SECONDS,
    ) -> None:
        """A worker without progress for `timeout` seconds is stuck; a bundle is no straggler for `grace` seconds."""
        start_ray(workers * settings.threads)
        gpus_each = _share_of_a_gpu(workers, settings.reserved_gpus) if settings.device.type == "cuda" else 0
        self.capacity = Capacity(workers, cpus_each=settings.threads, gpus_each=gpus_each)
        self._requests_at_once = settings.requests_at_once
        self._timeout = timeout
        self._start_worker = _starter(env, settings, make_fleet or envs.portable_fleets(env), gpus_each)
        self._idle: deque[Any] = deque()
        self._stragglers = StragglerDetector(grace)
        self._sent: PolicySnapshot | None = None
        self._sent_frozen: WeightArrays | None = None
        self._stopwatch = Stopwatch()

    @property
    def workers(self) -> int:
        """As many as were asked for, or as the cluster had room for when last looked at."""
        return self.capacity.workers

    def run(
        self, requests: Sequence[RolloutRequest], policy: PolicySnapshot | None = None
    ) -> Iterator[tuple[int, list[Trajectory]]]:
        sent = self._send(policy)
        retries = Retries(requests)
        waiting = deque(self._bundles(len(requests)))
        running: dict[Any, Attempt] = {}
        try:
            while waiting or running:
                workers = self.capacity.available_workers()
                waiting.extendleft(self._without_room(running, workers))
                while waiting and len(running) < workers:
                    self._begin(waiting.popleft(), requests, sent, running)
                for index, trajectories in self._finished(running, retries):
                    if trajectories is None:
                        waiting.appendleft((index,))
                    else:
                        yield index, trajectories
                if not waiting and len(running) < workers and (straggler := self._straggler(running)) is not None:
                    self._begin(straggler, requests, sent, running)
        finally:
            # A consumer that stops early leaves workers busy: end them, the next `run` starts new ones.
            for attempt in running.values():
                ray.kill(attempt.actor)
            for actor in self._idle:
                actor.close_experts.remote()

    def spent(self) -> Mapping[str, float]:
        return dict(self._stopwatch.seconds)

    def close(self) -> None:
        for actor in self._idle:
            ray.kill(actor)
        self._idle.clear()
        self._sent = self._sent_frozen = None
        if ray.is_initialized():
            self.capacity.release()
        stop_ray()

    def _bundles(self, requests: int) -> Iterator[Bundle]:
        """Of requests by their number; they depend on the settings, not on what the cluster has at the moment."""
        size = max(1, min(self._requests_at_once, -(-requests // self.capacity.wanted)))
        return (tuple(range(first, min(first + size, requests))) for first in range(0, requests, size))

    def _begin(
        self,
        bundle: Bundle,
        requests: Sequence[RolloutRequest],
        sent: PolicySnapshot | None,
        running: dict[Any, Attempt],
    ) -> None:
        was_idle = bool(self._idle)
        attempt = Attempt(bundle, self._idle.popleft() if was_idle else self._start_worker(), was_idle=was_idle)
        running[attempt.actor.run.remote([requests[index] for index in bundle], sent)] = attempt

    def _without_room(self, running: dict[Any, Attempt], workers: int) -> Iterator[Bundle]:
        """End workers that wait for the resources of a lost node, and yield their bundles: an idle worker, which may
        hold the last resources, can play them."""
        too_many = min(len(running) + len(self._idle) - workers, len(self._idle))
        unplaced = [future for future in running if not running[future].has_begun]
        for future in unplaced[: max(0, too_many)]:
            attempt = running.pop(future)
            ray.kill(attempt.actor)
            if all(other.bundle != attempt.bundle for other in running.values()):
                yield attempt.bundle

    def _send(self, policy: PolicySnapshot | None) -> PolicySnapshot | None:
        """The policy as workers get it: its weights are in the object store, and those of the one before are freed."""
        if policy is None:
            return None
        if self._sent is None or self._sent.token != policy.token:
            self._sent = None
            with self._stopwatch.timing(TRANSFER):
                weights = ObjectStoreWeights.of(policy.weights)
                self._sent = replace(policy, weights=weights, frozen=self._send_frozen(policy.frozen))
        return self._sent

    def _send_frozen(self, frozen: WeightArrays | None) -> WeightArrays | None:
        """Once for all versions of a policy."""
        if frozen is None:
            return None
        if self._sent_frozen is None or self._sent_frozen.token != frozen.token:
            self._sent_frozen = None
            self._sent_frozen = replace(frozen, weights=ObjectStoreWeights.of(frozen.weights))
        return self._sent_frozen

    def _finished(self, running: dict[Any, Attempt], retries: Retries) -> Iterator[tuple[int, list[Trajectory] | None]]:
        """Requests that no worker plays any more: with their episodes, or None if they must be played again.

        An answer, or giving up, ends every attempt at the bundle; after a failure another attempt goes on.
        """
        for future in self._ended(running):
            if future not in running:
                continue  # another attempt at the same bundle was first
            attempt = running.pop(future)
            others = [other for other in running if running[other].bundle == attempt.bundle]
            try:
                answers = self._answers(future, attempt)
            except _WorkerFailure as failure:
                ray.kill(attempt.actor)
                if others:
                    continue
                yield from self._lost(attempt, failure, retries)
                continue
            for other in others:
                ray.kill(running.pop(other).actor)
            for position, played, error in answers:
                index = attempt.bundle[position]
                yield index, retries.record(index, error) if played is None else played

    def _lost(
        self, attempt: Attempt, failure: _WorkerFailure, retries: Retries
    ) -> Iterator[tuple[int, list[Trajectory] | None]]:
        """What becomes of the requests of a worker that cannot go on. Of several, it is unknown which one failed."""
        unknown = len(attempt.bundle) > 1
        before_it_began = failure.process_died and attempt.may_have_been_dead
        for index in attempt.bundle:
            if unknown or before_it_began:
                yield index, None
            else:
                yield index, retries.record(index, str(failure), process_died=failure.process_died)

    def _ended(self, running: Mapping[Any, Attempt]) -> list[Any]:
        """The attempts that are done or failed, and those that are stuck."""
        done, busy = ray.wait(list(running), timeout=_WAIT_SECONDS)
        return [*done, *(future for future in busy if running[future].is_stuck(self._timeout))]

    def _answers(self, future: Any, attempt: Attempt) -> list[Answer]:
        """The episodes; the worker is idle again. An error meant for people is raised as it was in the worker."""
        try:
            with self._stopwatch.timing(TRANSFER):
                answers, spent = ray.get(future, timeout=0)
        except GetTimeoutError:
            raise _WorkerFailure(f"no step for {self._timeout:.0f} s") from None
        except RayTaskError as error:
            if not isinstance(error.cause, NightshiftError):
                raise _WorkerFailure(repr(error.cause)) from error
            self._idle.append(attempt.actor)
            raise error.cause from None
        except RayError as error:  # its process or its node died, or its answer is lost
            raise _WorkerFailure("its process died", process_died=True) from error
        self._idle.append(attempt.actor)
        self._stragglers.record(attempt.seconds)
        self._stopwatch.add(spent)
        return list(answers)

    def _straggler(self, running: Mapping[Any, Attempt]) -> Bundle | None:
        """The bundle to play a second time, if there is one and no running attempt is done."""
        if not running or ray.wait(list(running), timeout=0)[0]:
            return None
        return self._stragglers.slowest([(attempt.bundle, attempt.seconds) for attempt in running.values()])


class _WorkerFailure(Exception):
    """A worker that cannot go on, and why."""

    def __init__(self, why: str, *, process_died: bool = False) -> None:
        super().__init__(why)
        self.process_died = process_died


def _starter(env: config.Env, settings: EngineSettings, make_fleet: MakeFleet, gpus_each: float) -> Callable[[], Any]:
    """What starts a worker."""
    make_fleet_reference = ray.put(make_fleet)  # sent to every node once
    driver = version_check.versions(env.suite)
    # A group of one thread each: `run` keeps to its own, since a GL context belongs to the thread that made it.
    actor = ray.remote(
        num_cpus=settings.threads,
        num_gpus=gpus_each,
        concurrency_groups={HEARTBEAT_GROUP: 1},
    )(Worker)
    return lambda: actor.remote(env, settings, make_fleet_reference, driver)


def _share_of_a_gpu(workers: int, reserved: int) -> float:
    """What each worker asks for, so that all of them find a place: a worker acts on one GPU."""
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if gpus <= reserved:
        learning = f", {reserved} for the learner's ranks (machine.ranks)" if reserved else ""
        raise DeviceError(
            f"policies are to act on cuda, and the Ray cluster has {gpus} GPUs{learning}: none is left for workers",
            "lower machine.ranks, set machine.device to cpu in params.yaml, or add nodes with GPUs",
        )
    return 1 / math.ceil(workers / (gpus - reserved))
