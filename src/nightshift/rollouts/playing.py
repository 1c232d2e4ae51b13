"""Plays an iteration's episodes: after the update before it, or (staleness 1) while that update runs.

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
from nightshift.rollouts.engine import BUSY, INFERENCE, LOOK, SIMULATION, TRANSFER
from nightshift.rollouts.sampling import Group, Round, Sampler


class IterationPlayer:
    def __init__(self, pool: Pool, sampler: Sampler, settings: config.Rloo) -> None:
        self._pool = pool
        self._sampler = sampler
        self._overlaps = settings.sampling.staleness > 0
        self._executor = ThreadPoolExecutor(1)
        self._stopped = False
        self._future: Future[Round] | None = None
        self._before: dict[str, Any] | None = None
        self.prefetched_with: PolicySnapshot | None = None
        """The policy of the iteration that was started ahead; None if none was."""

    def __enter__(self) -> IterationPlayer:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the iteration that was started ahead, if there is one, after its current group."""
        self._stopped = True
        self._executor.shutdown()

    @property
    def sampler_state(self) -> dict[str, Any]:
        """The sampler's state before the next iteration to be played."""
        return self._before or self._sampler.state

    def prefetch(self, policy: PolicySnapshot) -> None:
        """Start the next iteration in the background, if `staleness` lets it overlap the update."""
        if self._overlaps:
            self._before, self.prefetched_with = self._sampler.state, policy
            self._future = self._executor.submit(self._play, policy)

    def play(self, policy: PolicySnapshot) -> Round:
        """The iteration that was started ahead, or a new one played by `policy`."""
        future, self._future, self._before, self.prefetched_with = self._future, None, None, None
        return self._play(policy) if future is None else future.result()

    def _play(self, policy: PolicySnapshot) -> Round:
        """Play waves until enough groups are accepted. Groups are taken in the order of their requests."""
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
    """Shares of the workers' time by activity; the rest of a busy worker's time is recording."""
    names = (BUSY, SIMULATION, LOOK, INFERENCE, TRANSFER)
    spent = {name: (after.get(name, 0.0) - before.get(name, 0.0)) / (workers * seconds) for name in names}
    return {
        "time/play": seconds,
        "time/share_simulation": spent[SIMULATION],
        "time/share_look": spent[LOOK],
        "time/share_inference": spent[INFERENCE],
        "time/share_record": spent[BUSY] - spent[SIMULATION] - spent[LOOK] - spent[INFERENCE],
        "time/share_transfer": spent[TRANSFER],
        "time/share_idle": 1 - spent[BUSY] - spent[TRANSFER],
    }
