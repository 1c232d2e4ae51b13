"""The safetensors file of a trajectory.

    columns.*   every field with a value per step, [T, B, …]
    frames.*    every observation once, [F, …]

`tensors` puts arrays of larger dtypes first, so a single read of the start of the file gets everything but the images.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from nightshift import files
from nightshift.data import tensors
from nightshift.data.replay.trajectory import COLUMNS, FORWARD_INPUTS, TrajectoryBatch
from nightshift.data.replay.validation import check_bounds
from nightshift.errors import DataError

_COLUMNS = "columns."
_FRAMES = "frames."


def write(path: Path, trajectory: TrajectoryBatch) -> str:
    """Write the trajectory to `path` and return the sha256 of the file."""
    arrays = {f"{_COLUMNS}{name}": column for name, column in trajectory.columns().items()}
    arrays |= {f"{_FRAMES}{name}": frames for name, frames in trajectory.frames.items()}
    note = {
        "max_episode_length": trajectory.max_episode_length,
        "model_weights_id": trajectory.model_weights_id,
    }
    digest = hashlib.sha256()

    def counted(chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for chunk in chunks:
            digest.update(chunk)
            yield chunk

    files.write_chunks(path, counted(tensors.chunks(arrays, json.dumps(note))))
    return digest.hexdigest()


def read(path: Path) -> TrajectoryBatch:
    """Read a trajectory; its arrays are memory-mapped views, and its rows point to existing frames."""
    arrays, note = tensors.read(path)
    columns = {name.removeprefix(_COLUMNS): a for name, a in arrays.items() if name.startswith(_COLUMNS)}
    plain: dict[str, Any] = {"next": None, **{name: column for name, column in columns.items() if name in COLUMNS}}
    try:
        trajectory = TrajectoryBatch(
            **plain,
            forward_inputs={
                name.removeprefix(FORWARD_INPUTS): column
                for name, column in columns.items()
                if name.startswith(FORWARD_INPUTS)
            },
            frames={name.removeprefix(_FRAMES): a for name, a in arrays.items() if name.startswith(_FRAMES)},
            **json.loads(note),
        )
        check_bounds(trajectory)
    except (DataError, TypeError, ValueError) as error:
        raise DataError(f"{path} is not a trajectory: {error}") from None
    return trajectory
