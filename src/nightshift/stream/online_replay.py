"""The online replay buffer of a learner: samples the episodes of its inbox at the ratio that a rate limiter allows.

The inbox holds every episode on disk, so the replay buffer keeps views of those files and stores nothing itself. A
checkpoint needs only the position in the inbox, the counters of the rate limiter and the state of the random generator;
a replay that is restored from it samples the same batches from the same episodes.

The rate limiter also holds actors back: while it does not admit all episodes that have arrived, the inbox defers new
ones, the spools of the actors fill, and `Spool.put` blocks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nightshift.data.rate_limiter import RateLimiter
from nightshift.data.replay import (
    TrajectoryBatch,
    TrajectoryReplay,
    TransitionBatch,
    TransitionSpec,
    trajectory_from_episode,
)
from nightshift.errors import DataError, StreamError
from nightshift.stream.inbox import Inbox, StoredEpisode


class OnlineReplay:
    """Example: OnlineReplay(inbox, limiter, TransitionSpec(n_step=3, discount=0.99), seed=0).sample(256)

    A source for a `Mixer` as well, which waits for the first episodes as `sample` does.
    """

    def __init__(self, inbox: Inbox, limiter: RateLimiter, spec: TransitionSpec, *, seed: int, window: int = 0) -> None:
        """The rate limiter counts transitions. `window` is how many of the newest episodes are sampled; 0 means all."""
        self._inbox = inbox
        self._limiter = limiter
        self._replay = TrajectoryReplay(seed=seed, capacity=window)
        self._source = self._replay.source(frame_stack=spec.frame_stack, n_step=spec.n_step, discount=spec.discount)
        self._inserting = threading.RLock()
        self._last: StoredEpisode | None = None
        self._inserted_transitions = 0
        inbox.accept_while(self._has_room)

    @property
    def total_samples(self) -> int:
        """The number of transitions that can be sampled now."""
        return self._replay.total_samples

    def can_sample(self, count: int) -> bool:
        """Whether `sample(count)` would return at once, after all episodes were inserted that may be."""
        self._insert_stored()
        return self._limiter.can_sample(count)

    def sample(self, count: int, /, timeout: float | None = None) -> TransitionBatch:
        """Sample a batch as soon as the rate limiter allows it; TimeoutError if too few episodes arrive in time."""
        with self._allowed(count, timeout):
            return self._source.sample(count)

    @contextlib.contextmanager
    def sampling(self, count: int, /) -> Iterator[TransitionBatch]:
        """As `sample`, for a `Mixer`: a batch that is not completed is not counted, and is drawn again."""
        with self._allowed(count, None), self._source.sampling(count) as batch:
            yield batch

    def metrics(self) -> dict[str, float]:
        held = {"online_replay/transitions": self.total_samples, "online_replay/waiting_transitions": self._waiting}
        return {**self._inbox.metrics(), **self._limiter.metrics(), **{name: float(n) for name, n in held.items()}}

    def state_dict(self) -> dict[str, Any]:
        """The JSON state for a checkpoint."""
        with self._inserting:
            return {
                "position": self._position,
                "last_episode": self._last.header.key if self._last else "",
                "limiter": self._limiter.state_dict(),
                "random_state": self._replay.random_state.hex(),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, which was taken with the same inbox; DataError if it was not."""
        with self._inserting:
            inserted = self._inserted_before(state)
            self._replay.random_state = _random_state(state)
            self._limiter.load_state_dict(state["limiter"])
            self._replay.clear()
            self._last, self._inserted_transitions = None, 0
            for stored in inserted:
                self._insert(stored)

    @property
    def _position(self) -> int:
        return self._last.position if self._last else 0

    @contextlib.contextmanager
    def _allowed(self, count: int, timeout: float | None) -> Iterator[None]:
        """Wait until the rate limiter allows `count` samples, and count them if the block does not raise."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._limiter.can_sample(count):
            if not self._insert_stored():
                self._wait_for_episode(count, deadline)
        with self._limiter.sampling(count):
            self._insert_stored()
            yield

    @property
    def _waiting(self) -> int:
        """Transitions in the inbox that are not inserted yet."""
        return max(self._inbox.transitions - self._inserted_transitions, 0)

    def _has_room(self) -> bool:
        waiting = self._waiting
        return not waiting or self._limiter.can_insert(waiting)

    def _insert_stored(self) -> bool:
        """Insert all stored episodes that the rate limiter admits; True if there was at least one."""
        with self._inserting:
            before = self._position
            for stored in self._inbox.stored_after(before):
                if stored.transitions:
                    if not self._limiter.can_insert(stored.transitions):
                        break
                    self._limiter.wait_for_insert(stored.transitions)
                self._insert(stored)
            return self._position > before

    def _insert(self, stored: StoredEpisode) -> None:
        if stored.transitions:
            self._replay.add_files([_StoredFile(stored)])
        self._last = stored
        self._inserted_transitions += stored.transitions

    def _wait_for_episode(self, count: int, deadline: float | None) -> None:
        if self._inbox.stored_after(self._position):
            raise StreamError(
                f"the rate limiter blocks both a batch of {count} and the next episode",
                "increase error_buffer: min_diff to max_diff must hold a batch plus the samples of one episode",
            )
        left = None if deadline is None else max(deadline - time.monotonic(), 0)
        if not self._inbox.wait_for_episode(self._position, left):
            raise TimeoutError(f"too few episodes arrived for a batch of {count}: {self._limiter.metrics()}")

    def _inserted_before(self, state: Mapping[str, Any]) -> list[StoredEpisode]:
        """The episodes that were inserted when `state` was taken; DataError if that was another inbox."""
        position, last = state.get("position"), state.get("last_episode")
        if type(position) is not int or position < 0:
            raise DataError(f"the state of a replay has position {position!r}", _OTHER_CHECKPOINT)
        inserted = [stored for stored in self._inbox.stored_after(0) if stored.position <= position]
        found = (inserted[-1].position, inserted[-1].header.key) if inserted else (0, "")
        if found != (position, last):
            raise DataError(
                f"the state was taken after episode {last!r} at position {position}, which is not in this inbox",
                "use the inbox of the checkpoint",
            )
        limiter = state.get("limiter")
        if not isinstance(limiter, Mapping):
            raise DataError("the state of a replay lacks its limiter", _OTHER_CHECKPOINT)
        self._limiter.check_state(limiter)
        if limiter["inserts"] < sum(stored.transitions for stored in inserted):
            raise DataError(f"the state has {dict(limiter)}, and more transitions were inserted", _OTHER_CHECKPOINT)
        return inserted


_OTHER_CHECKPOINT = "resume from another checkpoint"


def _random_state(state: Mapping[str, Any]) -> bytes:
    try:
        return bytes.fromhex(state["random_state"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"the state of a replay has a damaged random_state: {error!r}", _OTHER_CHECKPOINT) from None


@dataclass(frozen=True, slots=True)
class _StoredFile:
    """An episode of the inbox, for the replay buffer; its number in batches is its position in the inbox."""

    stored: StoredEpisode

    @property
    def num_samples(self) -> int:
        return self.stored.transitions

    def read(self, *, verify: bool) -> TrajectoryBatch:
        return trajectory_from_episode(self.stored.load(verify=verify), self.stored.position)
