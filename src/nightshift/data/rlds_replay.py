"""Pushes RLDS episodes into a trajectory replay; each becomes a trajectory of one environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nightshift.data import rlds_validation
from nightshift.data.replay import TrajectoryBatch, TrajectoryReplay
from nightshift.data.rlds import Transitions
from nightshift.errors import DataError


class TrajectoryReplayWriter:
    """Adapts a `TrajectoryReplay` to `push_to_replay`; nested observations are named "outer/inner"."""

    spec = None  # the replay itself checks the schema of all trajectories before it stores any

    def __init__(self, replay: TrajectoryReplay) -> None:
        self._replay = replay

    def add(self, episodes: Sequence[Transitions]) -> int:
        """Episode numbers start at the number of transitions in the buffer, which makes them unique."""
        first = self._replay.total_samples
        self._replay.add_trajectories([_trajectory(episode, first + n) for n, episode in enumerate(episodes)])
        kept = episodes[-self._replay.capacity :]  # all if capacity is 0; otherwise older ones were evicted
        return sum(episode.length for episode in kept)


def _trajectory(episode: Transitions, number: int) -> TrajectoryBatch:
    if isinstance(episode.action, Mapping):
        names = ", ".join(name for name, _ in rlds_validation.leaves(episode.action, "action"))
        raise DataError(f"the replay holds one array of actions, and these steps have {names}", "join them into one")
    return TrajectoryBatch.from_episode_steps(
        {name.removeprefix("/") or "observation": a for name, a in rlds_validation.leaves(episode.observation, "")},
        {"actions": episode.action, "rewards": episode.reward, "forward_inputs": {"discounts": episode.discount}},
        episode=number,
        terminated=episode.terminated,
        truncated=not episode.terminated,
    )
