"""Pushing RLDS episodes into a trajectory replay: each becomes a trajectory of one lane."""

from __future__ import annotations

from collections.abc import Sequence

from nightshift.data import rlds_rules
from nightshift.data.replay import TrajectoryBatch, TrajectoryReplay
from nightshift.data.rlds import Transitions


class IntoTrajectoryReplay:
    """A `TrajectoryReplay` as `push_to_replay` wants it; nested fields are named "outer/inner"."""

    spec = None  # the replay refuses what is not like the trajectories it holds, before it stores any

    def __init__(self, replay: TrajectoryReplay) -> None:
        self._replay = replay

    def add(self, episodes: Sequence[Transitions]) -> int:
        self._replay.add_trajectories([_trajectory(episode) for episode in episodes])
        kept = episodes[-self._replay.capacity :]  # all if it is 0; else the others had to make room for them
        return sum(episode.length for episode in kept)


def _trajectory(episode: Transitions) -> TrajectoryBatch:
    return TrajectoryBatch.of_steps(
        {name.removeprefix("/") or "observation": a for name, a in rlds_rules.leaves(episode.observation, "")},
        {"actions": episode.action, "rewards": episode.reward, "forward_inputs": {"discounts": episode.discount}},
        episode=0,
        terminated=episode.terminated,
        truncated=not episode.terminated,
    )
