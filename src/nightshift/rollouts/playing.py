"""Playing an iteration's episodes: after the update before it, or (staleness 1) while that update runs.

staleness 0   play 0 ─ update 0 ─ play 1 ─ update 1 ─ play 2 ─ update 2
staleness 1   play 0 ─┬ update 0 ─┬ update 1 ─┬ update 2
                      └ play 1 ───┴ play 2 ───┘            each with the policy before the update beside it
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from nightshift import config
from nightshift.policies.snapshot import PolicySnapshot
from nightshift.rollouts.base import Pool
from nightshift.rollouts.rollout import INFERENCE, SIMULATION
from nightshift.rollouts.sampling import Group, Round, Sampler
from nightshift.rollouts.worker import BUSY, TRANSFER


class Playing:
    def __init__(self, pool: Pool, sampler: Sampler, settings: config.Rloo) -> None:
        self._pool = pool
        self._sampler = sampler
        self._overlaps = settings.sampling.staleness > 0
        self._executor = ThreadPoolExecutor(1)
        self._stopped = False
        self._future: Future[Round] | None = None
        self._before: dict[str, Any] | None = None
        self.begun_with: PolicySnapshot | None = None
        """Who plays the iteration that was begun ahead; None if none was."""

    def __enter__(self) -> Playing:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nobody playing; what was begun and not asked for is given up, group by group."""
        self._stopped = True
        self._executor.shutdown()

    @property
    def sampler_state(self) -> dict[str, Any]:
        """Where the sampler was before the iteration that is to be played next."""
        return self._before or self._sampler.state

    def ahead(self, policy: PolicySnapshot) -> None:
        """Begin the next iteration, if it may overlap with what comes now."""
        if self._overlaps:
            self._before, self.begun_with = self._sampler.state, policy
            self._future = self._executor.submit(self._play, policy)

    def found(self, policy: PolicySnapshot) -> Round:
        """The iteration that was begun ahead, or a new one played by `policy`."""
        future, self._future, self._before, self.begun_with = self._future, None, None, None
        return self._play(policy) if future is None else future.result()

    def _play(self, policy: PolicySnapshot) -> Round:
        """Wave after wave until there is enough to learn from. Groups are taken in the order they were asked for."""
        started, before = time.perf_counter(), self._pool.spent()
        found = self._sampler.begin()
        while requests := found.wave():
            results: dict[int, Group] = {}
            for index, group in self._pool.run(requests, policy):
                results[index] = group
                if self._stopped:
                    return found
            found.take([results[index] for index in range(len(requests))])
        found.times = shares(before, self._pool.spent(), self._pool.workers, time.perf_counter() - started)
        return found


def shares(before: Mapping[str, float], after: Mapping[str, float], workers: int, seconds: float) -> dict[str, float]:
    """What part of the workers' time playing went where; what is left of a busy worker's time is keeping the record."""
    names = (BUSY, SIMULATION, INFERENCE, TRANSFER)
    spent = {name: (after.get(name, 0.0) - before.get(name, 0.0)) / (workers * seconds) for name in names}
    return {
        "time/play": seconds,
        "time/share_simulation": spent[SIMULATION],
        "time/share_inference": spent[INFERENCE],
        "time/share_record": spent[BUSY] - spent[SIMULATION] - spent[INFERENCE],
        "time/share_transfer": spent[TRANSFER],
        "time/share_idle": 1 - spent[BUSY] - spent[TRANSFER],
    }
