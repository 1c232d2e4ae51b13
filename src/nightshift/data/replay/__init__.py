"""Trajectory replay: stores whole trajectories, samples transitions."""

from nightshift.data.replay.batch import TransitionBatch, TransitionSpec
from nightshift.data.replay.buffer import ReplaySource, TrajectoryReplay
from nightshift.data.replay.episodes import trajectory_from_episode
from nightshift.data.replay.trajectory import TrajectoryBatch

__all__ = [
    "ReplaySource",
    "TrajectoryBatch",
    "TrajectoryReplay",
    "TransitionBatch",
    "TransitionSpec",
    "trajectory_from_episode",
]
