"""Episodes as trajectories of one environment, without copying arrays."""

from __future__ import annotations

from nightshift.data.episode import Episode
from nightshift.data.replay.trajectory import TrajectoryBatch
from nightshift.errors import DataError


def trajectory_from_episode(episode: Episode, number: int) -> TrajectoryBatch:
    """The N - 1 transitions of an episode of N steps; `number` must be unique in the buffer.

    Memory-mapped arrays stay memory-mapped, so an episode on disk is not stored again.
    """
    if episode.length == 1:
        raise DataError(f"the episode {episode.label} has one step and therefore no transition", "leave it out")
    acting = slice(-1)
    columns = {
        "actions": episode.actions[acting],
        "rewards": episode.rewards[acting],
        "intervene_flags": episode.interventions[acting],
        "versions": episode.policy_versions[acting],
        "forward_inputs": {
            "policy_actions": episode.policy_actions[acting],
            "discounts": episode.discounts[acting],
            **{f"extras.{name}": column[acting] for name, column in episode.extras.items()},
        },
    }
    return TrajectoryBatch.from_episode_steps(
        episode.observations, columns, episode=number, terminated=episode.terminated, truncated=episode.truncated
    )
