"""Rollouts on Ray actors. The only file that imports ray.

    stage (driver)                       workers (Ray actors, one simulator process each)
    ──────────────                       ───────────────────────────────────────────────
    run(requests, policy) ── put once ──▶ object store ──▶ read by every worker
      │  one request per idle worker ───▶ Worker.run(request) ──▶ episodes
      │◀─ ray.wait: whoever is done ─────┘
      │     yields (index, episodes), hands that worker the next request
      └─ a worker that died is replaced and its request is played again: the answer
         depends on the request alone, so it is the same

The driver waits for workers only; workers wait for nobody.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from nightshift import config
from nightshift.distributed.base import PolicySnapshot, Pool
from nightshift.distributed.local import LocalPool
from nightshift.distributed.worker import Worker
from nightshift.errors import NightshiftError, RolloutError
from nightshift.types import RolloutRequest, Trajectory

ATTEMPTS = 3
"""A request that kills its worker this often is not tried again."""
_WAIT_SECONDS = 0.5
_OBJECT_STORE_BYTES = 256 * 2**20


def open_pool(workers: int, env: config.Env) -> Pool:
    return RayPool(workers, env) if workers else LocalPool(env)


class RayPool:
    def __init__(self, workers: int, env: config.Env) -> None:
        _start_ray(workers)
        self._workers = workers
        self._env = env
        self._actor = ray.remote(num_cpus=1)(Worker)
        self._idle: deque[Any] = deque()

    def run(
        self, requests: Sequence[RolloutRequest], policy: PolicySnapshot | None = None
    ) -> Iterator[tuple[int, list[Trajectory]]]:
        reference = ray.put(policy)
        waiting = deque(enumerate(requests))
        attempts = [0] * len(requests)
        running: dict[Any, tuple[int, Any]] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self._workers:
                    index, request = waiting.popleft()
                    actor = self._idle.popleft() if self._idle else self._actor.remote(self._env)
                    attempts[index] += 1
                    running[actor.run.remote(request, reference)] = (index, actor)
                done, _ = ray.wait(list(running), timeout=_WAIT_SECONDS)
                for future in done:
                    index, actor = running.pop(future)
                    trajectories = self._collect(future, actor, requests[index], attempts[index])
                    if trajectories is None:
                        waiting.appendleft((index, requests[index]))
                    else:
                        yield index, trajectories
        finally:
            # A consumer that stops early leaves workers busy; fresh ones take their place when there is work again.
            for _, actor in running.values():
                ray.kill(actor)

    def close(self) -> None:
        for actor in self._idle:
            ray.kill(actor)
        self._idle.clear()
        ray.shutdown()

    def _collect(self, future: Any, actor: Any, request: RolloutRequest, attempt: int) -> list[Trajectory] | None:
        """The episodes, or None if the worker died and a fresh one should try again."""
        try:
            trajectories: list[Trajectory] = ray.get(future)
        except RayTaskError as error:
            self._idle.append(actor)
            if isinstance(error.cause, NightshiftError):
                raise error.cause from None
            raise
        except RayError as error:  # the process, its node or its answer is gone
            ray.kill(actor)
            if attempt >= ATTEMPTS:
                raise RolloutError(
                    f"the simulator died {ATTEMPTS} times on {request.task}, state {request.init_state}",
                    "set machine.workers to 0 in params.yaml to see its output",
                ) from error
            return None
        self._idle.append(actor)
        return trajectories


def _start_ray(workers: int) -> None:
    """Join the cluster at RAY_ADDRESS, or start a small one here. Ray must not keep our signal handlers."""
    if ray.is_initialized():
        return
    main = threading.current_thread() is threading.main_thread()
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)} if main else {}
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False, logging_level="error")
    else:
        ray.init(
            num_cpus=workers,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level="error",
        )
    for number, handler in handlers.items():
        signal.signal(number, handler)
