"""LeRobot datasets: v3.0 read and written, v2.1 read.

meta/info.json            features with dtype and shape, frames per second, where data and videos lie
meta/tasks.parquet        the instructions
meta/episodes/…parquet    every episode: length, tasks, which files hold it
data/…parquet             a row per frame: observation.*, action, next.*; pictures as PNG, unless they are in
videos/CAMERA/…mp4        films
nightshift/…              ours: what LeRobot has no place for, so that what we wrote comes back exactly

A frame is a step at which somebody acted. LeRobot has no final observation: where a dataset is not ours, the last one
stands in.
"""

from __future__ import annotations

from nightshift.data.formats.lerobot.reading import entries
from nightshift.data.formats.lerobot.writing import write

__all__ = ["entries", "write"]
