"""Rollouts in this process, behind the interface of the Ray pool. A simulator that segfaults ends this process too."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence

from nightshift import config, envs
from nightshift.errors import NightshiftError
from nightshift.policies.snapshot import PolicySnapshot
from nightshift.rollouts.base import MakeFleet
from nightshift.rollouts.retries import Retries
from nightshift.rollouts.worker import Worker
from nightshift.telemetry.stopwatch import Stopwatch
from nightshift.types import RolloutRequest, Trajectory

_log = logging.getLogger(__name__)


class LocalPool:
    def __init__(self, env: config.Env, *, make_fleet: MakeFleet = envs.make_fleet) -> None:
        self._env = env
        self._make_fleet = make_fleet
        self._worker = Worker(env, make_fleet)
        self._stopwatch = Stopwatch()

    def run(
        self, requests: Sequence[RolloutRequest], policy: PolicySnapshot | None = None
    ) -> Iterator[tuple[int, list[Trajectory]]]:
        retries = Retries(requests)
        for index in range(len(requests)):
            trajectories = None
            while trajectories is None:
                trajectories = self._attempt(index, requests[index], policy, retries)
            yield index, trajectories

    def spent(self) -> Mapping[str, float]:
        return dict(self._stopwatch.seconds)

    @property
    def workers(self) -> int:
        return 1

    def close(self) -> None:
        self._worker.close()

    def _attempt(
        self, index: int, request: RolloutRequest, policy: PolicySnapshot | None, retries: Retries
    ) -> list[Trajectory] | None:
        try:
            trajectories, spent = self._worker.run(request, policy)
        except NightshiftError:
            raise
        except Exception as error:  # noqa: BLE001 - simulators raise anything
            _log.warning("the simulator failed on %s, state %s", request.task, request.init_state, exc_info=True)
            with contextlib.suppress(Exception):
                self._worker.close()
            self._worker = Worker(self._env, self._make_fleet)
            return retries.record(index, repr(error))
        self._stopwatch.add(spent)
        return trajectories
