"""Writes LeRobot datasets, v3.0."""

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
from nightshift.data import rate, tensors
from nightshift.data.episode import OBSERVATIONS, Episode
from nightshift.data.formats.lerobot import images, layout, stats, tables
from nightshift.data.rate import FPS
from nightshift.data.tensors import Column
from nightshift.errors import DataError

_MEGABYTE = 2**20
_IMAGE_AXES = 4
_CHANNELS = 3
_MAX_AXES = 5
"""LeRobot's limit for the dimensions of an array per frame."""


def write(path: Path, episodes: Iterable[Episode], *, videos: bool = False) -> None:
    """Write a new dataset at `path`; `videos` stores images as MP4, which is smaller but lossy."""
    with files.new_folder(path) as new:
        dataset = _NewDataset(new, videos=videos)
        for episode in episodes:
            dataset.add(episode)
        dataset.finish()


class _NewDataset:
    def __init__(self, root: Path, *, videos: bool) -> None:
        self._root = root
        self._videos = videos
        self._features: dict[str, Any] = {}
        self._fps = 0
        self._tasks: dict[str, int] = {}
        self._rows: list[dict[str, Any]] = []
        self._stats: list[dict[str, stats.Stats]] = []
        self._frames = 0
        self._data = _DataFiles(root)

    def add(self, episode: Episode) -> None:
        if episode.length == 1:
            raise DataError(f"the episode {episode.label} has no action", "leave it out")
        where = _features_of_columns(episode)
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
            **self._write_videos(number, columns),
            **self._data.append(_table(columns, self._features), self._features),
        }
        self._stats.append({name: self._statistics(name, column) for name, column in columns.items()})
        self._rows.append(row)
        self._frames += episode.length - 1
        _write_sidecar(self._root / layout.sidecar(number), episode, where)

    def finish(self) -> None:
        if not self._rows:
            raise DataError("there are no episodes to write", "choose another split or source")
        self._data.close()
        self._write_episodes()
        aggregate = {name: stats.aggregate([part[name] for part in self._stats]) for name in self._stats[0]}
        files.write_json(self._root / layout.STATS, {name: _listed(part) for name, part in aggregate.items()})
        tasks = {"task_index": pa.array(self._tasks.values(), pa.int64()), "task": pa.array(self._tasks, pa.string())}
        pq.write_table(tables.with_index(pa.table(tasks), "task"), self._root / layout.TASKS)
        files.write_json(self._root / layout.INFO, self._info())

    def _declare(self, episode: Episode, columns: Mapping[str, Column]) -> None:
        """The first episode declares features and frame rate; DataError if a later one differs."""
        features = {name: self._feature(name, column) for name, column in columns.items()}
        features |= {name: layout.feature(dtype, ()) for name, dtype in layout.COUNTERS.items()}
        fps = _fps(episode)
        if not self._features:
            self._features, self._fps = features, fps
        elif features != self._features:
            differ = sorted(n for n in features | self._features if features.get(n) != self._features.get(n))
            raise DataError(f"{', '.join(differ)} of the episode {episode.label} differs from the episodes before it")
        elif fps != self._fps:
            raise DataError(f"the episode {episode.label} has {fps} steps per second, those before it {self._fps}")

    def _feature(self, name: str, column: Column) -> dict[str, Any]:
        if not _is_image(name):
            return layout.feature(column.dtype.name, column.shape[1:])
        described = layout.feature(
            "video" if self._videos else "image", column.shape[1:], ["height", "width", "channels"]
        )
        if not self._videos:
            return described
        height, width = column.shape[1:3]
        if height % 2 or width % 2:
            raise DataError(f"{name} is {width}x{height}: videos need even sizes", "export it without --video")
        info = {"video.height": height, "video.width": width, "video.channels": _CHANNELS, "has_audio": False}
        codec = {"video.codec": "h264", "video.pix_fmt": images.PIXELS, "video.is_depth_map": False}
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

    def _write_videos(self, number: int, columns: Mapping[str, Column]) -> dict[str, Any]:
        """Write one video per camera and return the columns that locate them."""
        row: dict[str, Any] = {}
        for key, feature in self._features.items():
            if feature["dtype"] != "video":
                continue
            location = layout.location(number)
            video = self._root / layout.VIDEO_PATH.format(video_key=key, **location)
            images.write_video(video, columns[key], self._fps)
            times = {"from_timestamp": 0.0, "to_timestamp": len(columns[key]) / self._fps}
            row |= {f"videos/{key}/{name}": value for name, value in {**location, **times}.items()}
        return row

    def _statistics(self, name: str, column: Column) -> stats.Stats:
        return stats.of_images(column) if _is_image(name) else stats.of_column(column)

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
            "video_path": layout.VIDEO_PATH if self._videos else None,
            "features": self._features,
        }


class _DataFiles:
    """Parquet files of limited size; an episode is one row group."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._number = 0
        self._size = 0
        self._writer: pq.ParquetWriter | None = None

    def append(self, table: pa.Table, features: Mapping[str, Any]) -> dict[str, int]:
        """Append an episode and return the columns that locate it."""
        if self._writer and self._size + table.nbytes > layout.DATA_FILE_MB * _MEGABYTE:
            self.close()
            self._number += 1
        location = layout.location(self._number)
        if self._writer is None:
            path = self._root / layout.DATA_PATH.format(**location)
            path.parent.mkdir(parents=True, exist_ok=True)
            schema = tables.with_features(table, features).schema
            self._writer, self._size = pq.ParquetWriter(path, schema, compression="snappy"), 0
        self._writer.write_table(table.cast(self._writer.schema))
        self._size += table.nbytes
        return {f"data/{name}": value for name, value in location.items()}

    def close(self) -> None:
        if self._writer:
            self._writer.close()
            self._writer = None


def _features_of_columns(episode: Episode) -> dict[str, str]:
    """The LeRobot feature of each column; columns without one go into the sidecar file, and so do the names."""
    found = {"actions": layout.ACTION, "rewards": layout.REWARD, "interventions": layout.INTERVENTION}
    for name, column in episode.observations.items():
        shown = column.dtype == np.uint8 and column.ndim == _IMAGE_AXES and column.shape[-1] == _CHANNELS
        feature = f"{layout.IMAGES if shown else layout.OBSERVATION}{name.replace('/', '.')}"  # which has no slashes
        if column.size and column.ndim - 1 <= _MAX_AXES and _is_image(feature) == shown:
            found[f"{OBSERVATIONS}{name}"] = feature
    if len(set(found.values())) < len(found):
        raise DataError(f"two observations would be the same feature of LeRobot: {', '.join(sorted(found))}")
    return found


def _frames(episode: Episode, where: Mapping[str, str]) -> dict[str, Column]:
    """All steps but the last, which has no action."""
    columns = episodes_module.columns(episode)
    return {feature: columns[name][:-1] for name, feature in where.items()}


def _endings(episode: Episode) -> dict[str, Column]:
    """LeRobot's features for the end of an episode."""
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
            arrays[name] = tables.images([images.to_png(image) for image in column])
        else:
            arrays[name] = tables.numbers(column.reshape(-1) if features[name]["shape"] == [1] else column)
    return pa.table(arrays)


def _write_sidecar(path: Path, episode: Episode, where: Mapping[str, str]) -> None:
    """Write the sidecar: last step, columns without a feature, header, and the feature of each other column."""
    columns = episodes_module.columns(episode)
    last = {f"last.{name}": columns[name][-1:] for name in where}
    whole = {f"whole.{name}": column for name, column in columns.items() if name not in where}
    note = {"header": episodes_module.header(episode), "features": dict(where)}
    tensors.write(path, {**last, **whole}, json.dumps(note))


def _task(episode: Episode) -> str:
    """The task of a LeRobot episode is its instruction."""
    return episode.provenance.language or episode.provenance.task


def _fps(episode: Episode) -> int:
    found = episode.metadata.get(FPS, rate.USUAL)
    if not isinstance(found, int | float) or found < 1 or found % 1:
        raise DataError(
            f"{FPS} is {found!r} in the metadata of the episode {episode.label}: LeRobot needs a positive integer"
        )
    return int(found)


def _is_image(name: str) -> bool:
    return name.startswith(layout.IMAGES)


def _listed(part: stats.Stats) -> dict[str, Any]:
    return {key: value.tolist() for key, value in part.items()}
