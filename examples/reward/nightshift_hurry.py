"""A reward of its own: the simulator's success, and a cost of every decision, so that sooner is better."""

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
        """What `rlpd` learns from: one reward per decision. The last step has the final observation and no reward."""
        episode = decision_episode(trajectory, provenance, discount)
        rewards = np.array(episode.rewards, np.float32)
        rewards[:-1] -= COST
        return replace(episode, rewards=rewards)
