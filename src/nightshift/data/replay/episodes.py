"""Our episodes as trajectories: one lane, one episode, nothing copied."""

from __future__ import annotations

from nightshift.data.episode import Episode
from nightshift.data.replay.trajectory import TrajectoryBatch
from nightshift.errors import DataError


def of_episode(episode: Episode, number: int) -> TrajectoryBatch:
    """The N - 1 transitions of an episode of N steps; `number` tells it from the others in the buffer.

    Arrays that are views of a file stay views of it: an episode that a learner holds on disk is not stored again.
    """
    if episode.length == 1:
        raise DataError(
            f"the episode {episode.label} has one step, so there is no transition to replay", "leave it out"
        )
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
    return TrajectoryBatch.of_steps(
        episode.observations, columns, episode=number, terminated=episode.terminated, truncated=episode.truncated
    )
