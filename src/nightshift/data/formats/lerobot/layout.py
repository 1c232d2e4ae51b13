"""Paths and feature names of a LeRobot dataset."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
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


_TEMPLATE_FIELD = re.compile(r"\{(\w+)(:0?\d?d?)?\}")


def fill(template: Any, values: Mapping[str, Any]) -> str:
    """The file name of a template such as `DATA_PATH`; ValueError for other format fields than plain numbers and names,
    with which a template could ask for gigabytes of padding."""
    if not isinstance(template, str) or re.search(r"[{}]", _TEMPLATE_FIELD.sub("", template)):
        raise ValueError(f"{template!r} is not a template of file names")
    return template.format(**values)


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A column as info.json declares it."""

    dtype: str  # "image" and "video" for cameras
    shape: tuple[int, ...]  # of one frame; of cameras [H, W, channels]


def parse_features(declared: Any, where: str) -> dict[str, Feature]:
    """The features of info.json; DataError if a dtype or a shape is not one."""
    features: dict[str, Feature] = {}
    for name, entry in dict(declared).items():
        dtype, shape = entry["dtype"], entry["shape"]
        sized = isinstance(shape, list) and all(type(size) is int and size > 0 for size in shape)
        if not isinstance(dtype, str) or not sized:
            raise DataError(
                f"{where} declares {name} as {dtype!r} of shape {shape!r}; a shape is a list of positive numbers",
                "correct it, or convert the dataset again",
            )
        features[name] = Feature(dtype=dtype, shape=_channels_last(shape, entry.get("names")))
    return features


def _channels_last(shape: list[int], names: Any) -> tuple[int, ...]:
    """LeRobot declares images channels first or last, and `names` says which; files always hold them last."""
    first = isinstance(names, list) and len(names) == len(shape) > 1 and str(names[0]).startswith("channel")
    return (*shape[1:], shape[0]) if first else tuple(shape)


def feature(dtype: str, shape: tuple[int, ...], names: list[str] | None = None) -> dict[str, Any]:
    """The description of a column in info.json; LeRobot has no scalars, only vectors of length 1."""
    return {"dtype": dtype, "shape": list(shape) or [1], "names": names}
