"""Paths and feature names of a LeRobot dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nightshift.data.tensors import SUFFIX
from nightshift.errors import DataError

VERSION = "v3.0"
OLD_VERSION = "v2.1"

INFO = Path("meta/info.json")
STATS = Path("meta/stats.json")
TASKS = Path("meta/tasks.parquet")
EPISODES = Path("meta/episodes")
_FILE = "chunk-{chunk_index:03d}/file-{file_index:03d}"
EPISODES_PATH = f"meta/episodes/{_FILE}.parquet"
DATA_PATH = f"data/{_FILE}.parquet"
VIDEO_PATH = "videos/{video_key}/" + _FILE + ".mp4"
OLD_EPISODES = Path("meta/episodes.jsonl")

FILES_PER_CHUNK = 1000
DATA_FILE_MB = 100
VIDEO_FILE_MB = 200

SIDECAR_FOLDER = Path("nightshift")
"""The folder of the sidecar files."""

OBSERVATION = "observation."
IMAGES = "observation.images."
ACTION = "action"
REWARD = "next.reward"
DONE = "next.done"
TRUNCATED = "next.truncated"
SUCCESS = "next.success"
INTERVENTION = "is_intervention"

COUNTERS = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}
"""Features of every dataset."""


def sidecar(episode: int) -> Path:
    """The sidecar file of an episode, with the fields that LeRobot does not have."""
    return SIDECAR_FOLDER / f"episode-{episode:06d}{SUFFIX}"


def location(number: int) -> dict[str, int]:
    """Chunk and file index of the file with this number."""
    return {"chunk_index": number // FILES_PER_CHUNK, "file_index": number % FILES_PER_CHUNK}


def inside(root: Path, relative: str) -> Path:
    """The path of a file of the dataset; raises DataError if it is outside of the dataset."""
    path = root / relative
    if not path.resolve().is_relative_to(root.resolve()):
        raise DataError(f"{root} is refused: it refers to {relative}, which is outside of it")
    return path


def feature(dtype: str, shape: tuple[int, ...], names: list[str] | None = None) -> dict[str, Any]:
    """The description of a column in info.json; LeRobot has no scalars, only vectors of length 1."""
    return {"dtype": dtype, "shape": list(shape) or [1], "names": names}
