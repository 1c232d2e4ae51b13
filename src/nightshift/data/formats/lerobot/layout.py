"""Where things lie in a LeRobot dataset, and what they are called."""

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
OLD_TASKS = Path("meta/tasks.jsonl")

FILES_PER_CHUNK = 1000
DATA_FILE_MB = 100
VIDEO_FILE_MB = 200

OURS = Path("nightshift")
"""The folder of what LeRobot has no place for."""

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
"""The features that every dataset has."""

PICTURES = ("image", "video")


def remainder(episode: int) -> Path:
    """Our file of what LeRobot has no place for."""
    return OURS / f"episode-{episode:06d}{SUFFIX}"


def place(number: int) -> dict[str, int]:
    """Chunk and file of the file with that number."""
    return {"chunk_index": number // FILES_PER_CHUNK, "file_index": number % FILES_PER_CHUNK}


def inside(root: Path, relative: str) -> Path:
    """A file of the dataset; a dataset that names one elsewhere is refused."""
    path = root / relative
    if not path.resolve().is_relative_to(root.resolve()):
        raise DataError(f"{root} is refused: it names {relative}, which lies outside of it")
    return path


def feature(dtype: str, shape: tuple[int, ...], names: list[str] | None = None) -> dict[str, Any]:
    """How info.json describes a column; LeRobot knows no scalars, only vectors of one."""
    return {"dtype": dtype, "shape": list(shape) or [1], "names": names}
