"""What a learner learns from: the episodes of its inbox, sampled at the pace that a limiter allows.

The inbox has every episode on disk, so nothing is stored again: the replay holds views of the inbox's files, and all
that a checkpoint needs is how far it has come. Restored from it, the same arrivals give the same batches.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from nightshift.data.limiter import Limiter
from nightshift.data.replay import Batch, TrajectoryReplay, View, of_episode
from nightshift.errors import StreamError
from nightshift.stream.inbox import Arrival, Inbox


class Experience:
    """Example: Experience(inbox, Limiter(Band.ratio(8, min_size=1000, error=4000)), View(n_step=3, discount=0.99))"""

    def __init__(self, inbox: Inbox, limiter: Limiter, view: View, *, seed: int, window: int = 0) -> None:
        """Transitions are what the limiter counts; `window` is the number of newest episodes to sample, 0 for all."""
        self._inbox = inbox
        self._limiter = limiter
        self._replay = TrajectoryReplay(seed=seed, sample_window_size=window)
        self._source = self._replay.source(stack=view.stack, n_step=view.n_step, discount=view.discount)
        self._position = 0

    @property
    def total_samples(self) -> int:
        return self._replay.total_samples

    def sample(self, count: int, /, timeout: float | None = None) -> Batch:
        """A batch, as soon as the limiter allows it; TimeoutError if nothing that would let it arrives in time."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._limiter.can_sample(count):
            if not self._take_in():
                self._await_more(count, deadline)
        self._limiter.await_sample(count)
        self._take_in()
        return self._source.sample(count)

    def metrics(self) -> dict[str, float]:
        return {**self._inbox.metrics(), **self._limiter.metrics()}

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, as JSON."""
        return {
            "position": self._position,
            "limiter": self._limiter.state(),
            "random_state": self._replay.random_state.hex(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state` was taken, in the same inbox."""
        self._replay.clear()
        for arrival in self._inbox.since(0):
            if arrival.position <= state["position"]:
                self._add(arrival)
        self._position = state["position"]
        self._limiter.restore(state["limiter"])
        self._replay.random_state = bytes.fromhex(state["random_state"])

    def _take_in(self) -> bool:
        """Everything that has arrived and that the limiter lets in; whether there was any."""
        before = self._position
        for arrival in self._inbox.since(before):
            transitions = arrival.load().length - 1
            if transitions and not self._limiter.can_insert(transitions):
                break
            if transitions:
                self._limiter.await_insert(transitions)
                self._add(arrival)
            self._position = arrival.position
        return self._position > before

    def _add(self, arrival: Arrival) -> None:
        episode = arrival.load()
        if episode.length > 1:
            self._replay.add_trajectories([of_episode(episode, arrival.position)])

    def _await_more(self, count: int, deadline: float | None) -> None:
        if self._inbox.since(self._position):
            raise StreamError(
                f"the limiter neither lets a batch of {count} out nor the next episode in",
                "widen its band to hold a batch and the samples that an episode earns",
            )
        left = None if deadline is None else max(deadline - time.monotonic(), 0)
        if not self._inbox.await_arrival(self._position, left):
            raise TimeoutError(f"no episode arrived that would allow a batch of {count}: {self._limiter.metrics()}")
