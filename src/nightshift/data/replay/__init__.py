"""Trajectory replay: what actors did, kept as it happened, sampled transition by transition."""

from nightshift.data.replay.batch import Batch, View
from nightshift.data.replay.buffer import ReplaySource, TrajectoryReplay
from nightshift.data.replay.episodes import of_episode
from nightshift.data.replay.trajectory import TrajectoryBatch

__all__ = ["Batch", "ReplaySource", "TrajectoryBatch", "TrajectoryReplay", "View", "of_episode"]
