"""The online replay buffer of a learner: samples the episodes of its inbox at the ratio that a rate limiter allows.

The inbox holds every episode on disk, so the replay buffer keeps views of those files and stores nothing itself. A
checkpoint needs only the position in the inbox, the counters of the rate limiter and the state of the random generator;
a replay that is restored from it samples the same batches from the same episodes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from nightshift.data.rate_limiter import RateLimiter
from nightshift.data.replay import TrajectoryReplay, TransitionBatch, TransitionSpec, trajectory_from_episode
from nightshift.errors import StreamError
from nightshift.stream.inbox import Inbox, StoredEpisode


class OnlineReplay:
    """Example: OnlineReplay(inbox, limiter, TransitionSpec(n_step=3, discount=0.99), seed=0).sample(256)"""

    def __init__(self, inbox: Inbox, limiter: RateLimiter, spec: TransitionSpec, *, seed: int, window: int = 0) -> None:
        """The rate limiter counts transitions. `window` is how many of the newest episodes are sampled; 0 means all."""
        self._inbox = inbox
        self._limiter = limiter
        self._replay = TrajectoryReplay(seed=seed, sample_window_size=window)
        self._source = self._replay.source(frame_stack=spec.frame_stack, n_step=spec.n_step, discount=spec.discount)
        self._position = 0

    @property
    def total_samples(self) -> int:
        return self._replay.total_samples

    def sample(self, count: int, /, timeout: float | None = None) -> TransitionBatch:
        """Sample a batch as soon as the rate limiter allows it; TimeoutError if too few episodes arrive in time."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._limiter.can_sample(count):
            if not self._insert_stored():
                self._wait_for_episode(count, deadline)
        self._limiter.wait_for_sample(count)
        self._insert_stored()
        return self._source.sample(count)

    def metrics(self) -> dict[str, float]:
        return {**self._inbox.metrics(), **self._limiter.metrics()}

    def state_dict(self) -> dict[str, Any]:
        """The JSON state for a checkpoint."""
        return {
            "position": self._position,
            "limiter": self._limiter.state_dict(),
            "random_state": self._replay.random_state.hex(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, which was taken with the same inbox."""
        self._replay.clear()
        for stored in self._inbox.stored_after(0):
            if stored.position <= state["position"]:
                self._add(stored)
        self._position = state["position"]
        self._limiter.load_state_dict(state["limiter"])
        self._replay.random_state = bytes.fromhex(state["random_state"])

    def _insert_stored(self) -> bool:
        """Insert all stored episodes that the rate limiter admits; True if there was at least one."""
        before = self._position
        for stored in self._inbox.stored_after(before):
            transitions = stored.load().length - 1
            if transitions and not self._limiter.can_insert(transitions):
                break
            if transitions:
                self._limiter.wait_for_insert(transitions)
                self._add(stored)
            self._position = stored.position
        return self._position > before

    def _add(self, stored: StoredEpisode) -> None:
        episode = stored.load()
        if episode.length > 1:
            self._replay.add_trajectories([trajectory_from_episode(episode, stored.position)])

    def _wait_for_episode(self, count: int, deadline: float | None) -> None:
        if self._inbox.stored_after(self._position):
            raise StreamError(
                f"the rate limiter blocks both a batch of {count} and the next episode",
                "increase error_buffer: min_diff to max_diff must hold a batch plus the samples of one episode",
            )
        left = None if deadline is None else max(deadline - time.monotonic(), 0)
        if not self._inbox.wait_for_episode(self._position, left):
            raise TimeoutError(f"too few episodes arrived for a batch of {count}: {self._limiter.metrics()}")
