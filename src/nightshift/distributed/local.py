"""Rollouts in this process, behind the same interface as the Ray pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nightshift import config
from nightshift.distributed.base import PolicySnapshot
from nightshift.distributed.worker import Worker
from nightshift.types import RolloutRequest, Trajectory


class LocalPool:
    def __init__(self, env: config.Env) -> None:
        self._worker = Worker(env)

    def run(
        self, requests: Sequence[RolloutRequest], policy: PolicySnapshot | None = None
    ) -> Iterator[tuple[int, list[Trajectory]]]:
        for index, request in enumerate(requests):
            yield index, self._worker.run(request, policy)

    def close(self) -> None:
        self._worker.close()
