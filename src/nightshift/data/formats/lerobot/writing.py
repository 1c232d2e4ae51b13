"""Write a LeRobot dataset, v3.0."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nightshift import files
from nightshift.data import episode as episodes_module
from nightshift.data import tensors
from nightshift.data.episode import OBSERVATIONS, Episode
from nightshift.data.formats.lerobot import layout, pictures, stats, tables
from nightshift.data.tensors import Column
from nightshift.errors import DataError

FPS = "fps"
"""The name of the frames per second in an episode's metadata."""
USUAL_FPS = 20
"""Of an episode that does not say: the simulators' control steps per second."""

_MEGABYTE = 2**20
_PICTURE_AXES = 4
_CHANNELS = 3
_MOST_AXES = 5
"""Of an array at one frame, for LeRobot."""


def write(path: Path, episodes: Iterable[Episode], *, films: bool = False) -> None:
    """A new dataset at `path`; with `films` pictures become MP4, which is smaller and not exact."""
    with files.new_folder(path) as new:
        dataset = _NewDataset(new, films=films)
        for episode in episodes:
            dataset.add(episode)
        dataset.finish()


class _NewDataset:
    def __init__(self, root: Path, *, films: bool) -> None:
        self._root = root
        self._films = films
        self._features: dict[str, Any] = {}
        self._fps = 0
        self._tasks: dict[str, int] = {}
        self._rows: list[dict[str, Any]] = []
        self._stats: list[dict[str, stats.Stats]] = []
        self._frames = 0
        self._data = _DataFiles(root)

    def add(self, episode: Episode) -> None:
        if episode.length == 1:
            raise DataError(f"nobody acts in the episode {episode.label}", "LeRobot has no place for it: leave it out")
        where = _where_columns_go(episode)
        columns = {**_frames(episode, where), **_endings(episode)}
        self._declare(episode, columns)
        columns |= self._counters(episode)
        number = len(self._rows)
        row = {
            "episode_index": number,
            "tasks": [_task(episode)],
            "length": episode.length - 1,
            "dataset_from_index": self._frames,
            "dataset_to_index": self._frames + episode.length - 1,
            "meta/episodes/chunk_index": 0,
            "meta/episodes/file_index": 0,
            **self._write_films(number, columns),
            **self._data.append(_table(columns, self._features), self._features),
        }
        self._stats.append({name: self._statistics(name, column) for name, column in columns.items()})
        self._rows.append(row)
        self._frames += episode.length - 1
        _write_remainder(self._root / layout.remainder(number), episode, where)

    def finish(self) -> None:
        if not self._rows:
            raise DataError("there are no episodes to write")
        self._data.close()
        self._write_episodes()
        together = {name: stats.together([part[name] for part in self._stats]) for name in self._stats[0]}
        files.write_json(self._root / layout.STATS, {name: _listed(part) for name, part in together.items()})
        tasks = {"task_index": pa.array(self._tasks.values(), pa.int64()), "task": pa.array(self._tasks, pa.string())}
        pq.write_table(tables.with_index(pa.table(tasks), "task"), self._root / layout.TASKS)
        files.write_json(self._root / layout.INFO, self._info())

    def _declare(self, episode: Episode, columns: Mapping[str, Column]) -> None:
        """Features and frame rate are the first episode's; one that differs is refused."""
        features = {name: self._feature(name, column) for name, column in columns.items()}
        features |= {name: layout.feature(dtype, ()) for name, dtype in layout.COUNTERS.items()}
        fps = _fps(episode)
        if not self._features:
            self._features, self._fps = features, fps
        elif features != self._features:
            differ = sorted(n for n in features | self._features if features.get(n) != self._features.get(n))
            raise DataError(f"{', '.join(differ)} of the episode {episode.label} is not as in the episodes before it")
        elif fps != self._fps:
            raise DataError(f"the episode {episode.label} has {fps} steps per second, those before it {self._fps}")

    def _feature(self, name: str, column: Column) -> dict[str, Any]:
        if not _is_picture(name):
            return layout.feature(column.dtype.name, column.shape[1:])
        described = layout.feature(
            "video" if self._films else "image", column.shape[1:], ["height", "width", "channels"]
        )
        if not self._films:
            return described
        height, width = column.shape[1:3]
        if height % 2 or width % 2:
            raise DataError(f"{name} is {width}x{height}: films need even sizes", "export it without --video")
        info = {"video.height": height, "video.width": width, "video.channels": _CHANNELS, "has_audio": False}
        codec = {"video.codec": "h264", "video.pix_fmt": pictures.PIXELS, "video.is_depth_map": False}
        return {**described, "info": {**info, **codec}}

    def _counters(self, episode: Episode) -> dict[str, Column]:
        steps = np.arange(episode.length - 1)
        task = self._tasks.setdefault(_task(episode), len(self._tasks))
        return {
            "timestamp": (steps / self._fps).astype(np.float32),
            "frame_index": steps,
            "episode_index": np.full_like(steps, len(self._rows)),
            "index": self._frames + steps,
            "task_index": np.full_like(steps, task),
        }

    def _write_films(self, number: int, columns: Mapping[str, Column]) -> dict[str, Any]:
        """One film per camera and episode, and where it is."""
        row: dict[str, Any] = {}
        for key, feature in self._features.items():
            if feature["dtype"] != "video":
                continue
            place = layout.place(number)
            film = self._root / layout.VIDEO_PATH.format(video_key=key, **place)
            pictures.write_film(film, columns[key], self._fps)
            times = {"from_timestamp": 0.0, "to_timestamp": len(columns[key]) / self._fps}
            row |= {f"videos/{key}/{name}": value for name, value in {**place, **times}.items()}
        return row

    def _statistics(self, name: str, column: Column) -> stats.Stats:
        return stats.of_pictures(column) if _is_picture(name) else stats.of_column(column)

    def _write_episodes(self) -> None:
        rows = [
            {**row, **{f"stats/{name}/{key}": value for name, of in part.items() for key, value in _listed(of).items()}}
            for row, part in zip(self._rows, self._stats, strict=True)
        ]
        path = self._root / layout.EPISODES_PATH.format(chunk_index=0, file_index=0)
        path.parent.mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows), path)

    def _info(self) -> dict[str, Any]:
        return {
            "codebase_version": layout.VERSION,
            "robot_type": None,
            "total_episodes": len(self._rows),
            "total_frames": self._frames,
            "total_tasks": len(self._tasks),
            "chunks_size": layout.FILES_PER_CHUNK,
            "data_files_size_in_mb": layout.DATA_FILE_MB,
            "video_files_size_in_mb": layout.VIDEO_FILE_MB,
            "fps": self._fps,
            "splits": {"train": f"0:{len(self._rows)}"},
            "data_path": layout.DATA_PATH,
            "video_path": layout.VIDEO_PATH if self._films else None,
            "features": self._features,
        }


class _DataFiles:
    """Parquet files of at most so many megabytes; an episode is one row group."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._number = 0
        self._size = 0
        self._writer: pq.ParquetWriter | None = None

    def append(self, table: pa.Table, features: Mapping[str, Any]) -> dict[str, int]:
        """Where it went."""
        if self._writer and self._size + table.nbytes > layout.DATA_FILE_MB * _MEGABYTE:
            self.close()
            self._number += 1
        place = layout.place(self._number)
        if self._writer is None:
            path = self._root / layout.DATA_PATH.format(**place)
            path.parent.mkdir(parents=True, exist_ok=True)
            schema = tables.with_features(table, features).schema
            self._writer, self._size = pq.ParquetWriter(path, schema, compression="snappy"), 0
        self._writer.write_table(table.cast(self._writer.schema))
        self._size += table.nbytes
        return {f"data/{name}": value for name, value in place.items()}

    def close(self) -> None:
        if self._writer:
            self._writer.close()
            self._writer = None


def _where_columns_go(episode: Episode) -> dict[str, str]:
    """The feature that holds each column of an episode; those without one go into our own file."""
    found = {"actions": layout.ACTION, "rewards": layout.REWARD, "interventions": layout.INTERVENTION}
    for name, column in episode.observations.items():
        if "/" in name:
            raise DataError(f"the observation {name} cannot be a feature of LeRobot: no slashes", "rename it")
        shown = column.dtype == np.uint8 and column.ndim == _PICTURE_AXES and column.shape[-1] == _CHANNELS
        if column.size and column.ndim - 1 <= _MOST_AXES:
            found[f"{OBSERVATIONS}{name}"] = f"{layout.IMAGES if shown else layout.OBSERVATION}{name}"
    if len(set(found.values())) < len(found):
        raise DataError(f"two observations would be the same feature of LeRobot: {', '.join(sorted(found))}")
    return found


def _frames(episode: Episode, where: Mapping[str, str]) -> dict[str, Column]:
    """The steps at which somebody acted."""
    columns = episodes_module.columns(episode)
    return {feature: columns[name][:-1] for name, feature in where.items()}


def _endings(episode: Episode) -> dict[str, Column]:
    """What came of the last action, in the features LeRobot has for it."""
    last = np.arange(episode.length - 1) == episode.length - 2
    return {
        layout.DONE: last,
        layout.TRUNCATED: last & episode.truncated,
        layout.SUCCESS: last & episode.success,
    }


def _table(columns: Mapping[str, Column], features: Mapping[str, Any]) -> pa.Table:
    arrays = {}
    for name, column in columns.items():
        if features[name]["dtype"] == "video":
            continue
        if features[name]["dtype"] == "image":
            arrays[name] = tables.pictures([pictures.to_png(picture) for picture in column])
        else:
            arrays[name] = tables.numbers(column.reshape(-1) if features[name]["shape"] == [1] else column)
    return pa.table(arrays)


def _write_remainder(path: Path, episode: Episode, where: Mapping[str, str]) -> None:
    """The last step, which is no frame, and the columns that have no feature; the header; where the rest is."""
    columns = episodes_module.columns(episode)
    last = {f"last.{name}": columns[name][-1:] for name in where}
    whole = {f"whole.{name}": column for name, column in columns.items() if name not in where}
    note = {"header": episodes_module.header(episode), "features": dict(where)}
    tensors.write(path, {**last, **whole}, json.dumps(note))


def _task(episode: Episode) -> str:
    """LeRobot's tasks are instructions."""
    return episode.provenance.language or episode.provenance.task


def _fps(episode: Episode) -> int:
    found = episode.metadata.get(FPS, USUAL_FPS)
    if not isinstance(found, int | float) or found < 1 or found % 1:
        raise DataError(
            f"{FPS} is {found!r} in the metadata of the episode {episode.label}: LeRobot counts whole frames"
        )
    return int(found)


def _is_picture(name: str) -> bool:
    return name.startswith(layout.IMAGES)


def _listed(part: stats.Stats) -> dict[str, Any]:
    return {key: value.tolist() for key, value in part.items()}
