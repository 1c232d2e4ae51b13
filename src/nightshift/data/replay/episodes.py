"""Episodes as trajectories of one environment, without copying arrays."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nightshift.data import episode as episodes
from nightshift.data.episode import Episode
from nightshift.data.episode_store import EpisodeStore
from nightshift.data.replay.trajectory import TrajectoryBatch
from nightshift.errors import DataError


def trajectory_from_episode(episode: Episode, number: int) -> TrajectoryBatch:
    """The N - 1 transitions of an episode of N steps; `number` must be unique in the buffer.

    Memory-mapped arrays stay memory-mapped, so an episode on disk is not stored again.
    """
    _check_has_transition(episode)
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


@dataclass(frozen=True, slots=True)
class StoreFile:
    """An episode of a store, for a replay buffer. The store's manifest has its checksum, if there is one."""

    path: Path
    number: int
    num_samples: int

    def read(self, *, verify: bool) -> TrajectoryBatch:
        return trajectory_from_episode(episodes.load(self.path), self.number)


def files_of_store(store: EpisodeStore, first: int) -> list[StoreFile]:
    """The episodes of a store, numbered from `first`; each file is mapped for a moment, to read its length."""
    return [_store_file(store.path(key), number) for number, key in enumerate(store.keys(), first)]


def _store_file(path: Path, number: int) -> StoreFile:
    episode = episodes.load(path)
    _check_has_transition(episode)
    return StoreFile(path, number, episode.length - 1)


def _check_has_transition(episode: Episode) -> None:
    if episode.length == 1:
        raise DataError(f"the episode {episode.label} has one step and therefore no transition", "leave it out")
