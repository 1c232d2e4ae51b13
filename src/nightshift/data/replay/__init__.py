"""Trajectory replay: what actors did, kept as it happened, sampled transition by transition."""

from nightshift.data.replay.batch import Batch, View
from nightshift.data.replay.buffer import TrajectoryReplay
from nightshift.data.replay.trajectory import TrajectoryBatch

__all__ = ["Batch", "TrajectoryBatch", "TrajectoryReplay", "View"]
