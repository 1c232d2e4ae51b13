"""LeRobot datasets: reads v3.0 and v2.1, writes v3.0.

meta/info.json            features with dtype and shape, frames per second, paths of data and videos
meta/tasks.parquet        the instructions
meta/episodes/…parquet    every episode: length, tasks, files
data/…parquet             a row per frame: observation.*, action, next.*; images as PNG, unless they are
videos/CAMERA/…mp4        in videos
nightshift/…              sidecar files: fields that LeRobot does not have, so that reading our own export is lossless

A frame is a step with an action. LeRobot has no final observation; for datasets that we did not write, the last
observation is repeated.
"""

from __future__ import annotations

from nightshift.data.formats.lerobot.reader import list_episodes
from nightshift.data.formats.lerobot.writer import write

__all__ = ["list_episodes", "write"]
