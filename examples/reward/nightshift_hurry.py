"""A reward of its own: the simulator's success, and a cost of every control step, so that sooner is better."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nightshift import config
from nightshift.data.decisions import decision_episode
from nightshift.data.episode import Episode
from nightshift.types import Provenance, RolloutRequest, Trajectory

COST = 0.02


class Hurry:
    def check(self, env: config.Env) -> None:
        """Every simulator reports success. A reward that needs a camera raises a ConfigError here if it is missing."""

    def request(self, request: RolloutRequest) -> RolloutRequest:
        """A reward that judges camera images asks for them here: replace(request, cameras=("agentview",))."""
        return request

    def episode(self, trajectory: Trajectory, provenance: Provenance, discount: float) -> Episode:
        """What `rlpd` learns from: one reward per decision, the discounted sum over its control steps. The last row has
        the final observation and no reward."""
        episode = decision_episode(trajectory, provenance, discount)
        starts = range(0, trajectory.length, trajectory.chunk)
        steps = [min(trajectory.chunk, trajectory.length - start) for start in starts]
        return _minus(episode, [COST * sum(discount**step for step in range(count)) for count in steps])

    def demo(self, episode: Episode) -> Episode:
        """A demo by the same reward: one per control step."""
        return _minus(episode, [COST] * (episode.length - 1))


def _minus(episode: Episode, costs: list[float]) -> Episode:
    rewards = np.array(episode.rewards, np.float32)
    rewards[:-1] -= np.array(costs, np.float32)
    return replace(episode, rewards=rewards)
