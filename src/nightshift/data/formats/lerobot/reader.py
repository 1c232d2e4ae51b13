"""Reads LeRobot datasets, v3.0 and v2.1."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nightshift import files
from nightshift.data import episode as episodes_module
from nightshift.data import tensors
from nightshift.data.episode import NO_POLICY, Episode, with_last
from nightshift.data.formats import REPEATED_FINAL, SUCCESS_ASSUMED, EpisodeRef, common
from nightshift.data.formats.lerobot import images, layout, tables
from nightshift.data.formats.lerobot.writer import FPS
from nightshift.data.tensors import Column
from nightshift.errors import DataError

SOURCE = "lerobot"
FEATURES_LEFT_OUT = "features_left_out"
"""Metadata key: names of the text features, which are not imported."""

_READ_ERRORS = (ValueError, KeyError, TypeError, IndexError, AttributeError, OSError, pa.ArrowException)
_EXPORT_CHANGED = (
    "export it again, or delete its manifest.json and its folder nightshift to read it as any other LeRobot dataset"
)


@dataclass(frozen=True, kw_only=True)
class EpisodeLocation:
    """The location of one episode; paths are relative to the dataset."""

    number: int
    length: int
    tasks: Sequence[str]
    data: str
    videos: Mapping[str, tuple[str, float]]  # by feature: file, and start time of the episode in it in seconds


@dataclass(frozen=True, kw_only=True)
class LeRobotDataset:
    root: Path
    fps: float
    features: Mapping[str, Mapping[str, Any]]
    locations: Sequence[EpisodeLocation]


def list_episodes(path: Path, task: str) -> list[EpisodeRef]:
    if not (path / layout.INFO).is_file():
        raise DataError(f"{path} is not a LeRobot dataset: it has no {layout.INFO}")
    is_export = (path / layout.SIDECAR_FOLDER).is_dir()
    if is_export:
        files.verify_folder(path, _EXPORT_CHANGED)
    try:
        dataset = _open(path)
    except _READ_ERRORS as error:
        raise DataError(f"{path / 'meta'} is damaged or has another layout: {error!r}") from None
    load = partial(_load_export, dataset) if is_export else partial(_load, dataset, task=task)
    return [
        EpisodeRef(key=common.episode_key(location.number, "episode"), load=partial(_guarded, load, dataset, location))
        for location in dataset.locations
    ]


def _guarded(load: Any, dataset: LeRobotDataset, location: EpisodeLocation) -> Episode:
    """Turn the errors that Arrow raises for a damaged file into a DataError."""
    try:
        found: Episode = load(location)
    except _READ_ERRORS as error:
        where = f"{dataset.root / location.data}, episode {location.number}"
        raise DataError(f"{where} is damaged or has another layout: {error!r}") from None
    return found


def _open(root: Path) -> LeRobotDataset:
    info = json.loads((root / layout.INFO).read_text())
    version = info["codebase_version"]
    if version == layout.VERSION:
        locations = _locations(root, info)
    elif version == layout.OLD_VERSION:
        locations = _old_locations(root, info)
    else:
        raise DataError(
            f"{root} is a LeRobot dataset of version {version}, not {layout.VERSION} or {layout.OLD_VERSION}",
            "convert it with LeRobot's own scripts",
        )
    return LeRobotDataset(root=root, fps=info["fps"], features=info["features"], locations=locations)


def _locations(root: Path, info: Mapping[str, Any]) -> list[EpisodeLocation]:
    videos = [name for name, feature in info["features"].items() if feature["dtype"] == "video"]
    rows = []
    for file in sorted((root / layout.EPISODES).rglob("*.parquet")):
        names = [name for name in pq.read_schema(file).names if not name.startswith("stats/")]
        rows += pq.read_table(file, columns=names).to_pylist()
    return [
        EpisodeLocation(
            number=row["episode_index"],
            length=row["length"],
            tasks=row["tasks"],
            data=info["data_path"].format(chunk_index=row["data/chunk_index"], file_index=row["data/file_index"]),
            videos={
                key: (
                    info["video_path"].format(
                        video_key=key,
                        chunk_index=row[f"videos/{key}/chunk_index"],
                        file_index=row[f"videos/{key}/file_index"],
                    ),
                    row[f"videos/{key}/from_timestamp"],
                )
                for key in videos
            },
        )
        for row in sorted(rows, key=lambda row: row["episode_index"])
    ]


def _old_locations(root: Path, info: Mapping[str, Any]) -> list[EpisodeLocation]:
    videos = [name for name, feature in info["features"].items() if feature["dtype"] == "video"]
    rows = [json.loads(line) for line in (root / layout.OLD_EPISODES).read_text().splitlines()]
    locations = []
    for row in rows:
        number = row["episode_index"]
        names = {"episode_chunk": number // info["chunks_size"], "episode_index": number}
        locations.append(
            EpisodeLocation(
                number=number,
                length=row["length"],
                tasks=row["tasks"],
                data=info["data_path"].format(**names),
                videos={key: (info["video_path"].format(video_key=key, **names), 0.0) for key in videos},
            )
        )
    return locations


def _load(dataset: LeRobotDataset, location: EpisodeLocation, task: str) -> Episode:
    where = f"{dataset.root}, episode {location.number}"
    columns, left_out = _columns(dataset, location, where)
    actions = _taken(columns, layout.ACTION, where)
    rewards, assumed = _rewards(columns, location.length)
    success = bool(columns[layout.SUCCESS][-1]) if layout.SUCCESS in columns else bool(rewards[-1] > 0)
    truncated = bool(columns[layout.TRUNCATED][-1]) if layout.TRUNCATED in columns else not success
    language = "; ".join(location.tasks)
    interventions = columns.pop(layout.INTERVENTION, np.zeros(location.length, np.bool_))
    observed = {name: columns.pop(name) for name in list(columns) if f"{name}.".startswith(layout.OBSERVATION)}
    return Episode(
        observations=_named({name: with_last(seen, seen[-1]) for name, seen in observed.items()}),
        actions=with_last(actions),
        rewards=with_last(rewards),
        discounts=np.ones(location.length + 1, np.float32),
        interventions=with_last(interventions.reshape(location.length) != 0),
        policy_actions=with_last(actions),
        policy_versions=np.full(location.length + 1, NO_POLICY, np.int64),
        terminated=not truncated,
        truncated=truncated,
        success=success,
        provenance=common.provenance(
            source=SOURCE,
            path=dataset.root,
            location=str(location.number),
            task=common.resolve_task("", task or "_".join(language.split()), where),
            language=language,
        ),
        extras={name: with_last(column) for name, column in columns.items()},
        metadata={REPEATED_FINAL: True, FPS: dataset.fps, **assumed, **left_out},
    )


def _load_export(dataset: LeRobotDataset, location: EpisodeLocation) -> Episode:
    """Load an episode that Nightshift exported, without loss."""
    path = dataset.root / layout.sidecar(location.number)
    rest, note = tensors.read(path)
    described = json.loads(note)
    features = set(described["features"].values())
    found, _ = _columns(dataset, location, str(path), features)
    columns = {name.removeprefix("whole."): column for name, column in rest.items() if name.startswith("whole.")}
    for name, feature in described["features"].items():
        last = rest[f"last.{name}"]
        columns[name] = np.concatenate([found[feature].reshape(location.length, *last.shape[1:]), last])
    return episodes_module.assemble(columns, described["header"])


def _columns(
    dataset: LeRobotDataset, location: EpisodeLocation, where: str, wanted: set[str] | None = None
) -> tuple[dict[str, Column], dict[str, list[str]]]:
    """The wanted features of an episode as arrays [T, …], and metadata with the names of text features."""
    table = _rows(dataset, location, where)
    seconds = tables.to_numpy(table["timestamp"], f"{where}: timestamp")
    left_out = []
    columns: dict[str, Column] = {}
    for name, feature in dataset.features.items():
        if name in ("frame_index", "episode_index", "index") or (wanted is not None and name not in wanted):
            continue
        if feature["dtype"] == "video":
            file, start = location.videos[name]
            video = layout.inside(dataset.root, file)
            columns[name] = images.read_video(video, (start + seconds).tolist(), dataset.fps, f"{where}: {name}")
        elif feature["dtype"] == "image":
            columns[name] = _images(dataset.root, table[name], f"{where}: {name}")
        elif pa.types.is_string(table[name].type) or pa.types.is_large_string(table[name].type):
            left_out.append(name)
        else:
            flat = common.native_dtype(tables.to_numpy(table[name], f"{where}: {name}"), f"{where}: {name}")
            columns[name] = flat.reshape(location.length, *feature["shape"])
    return columns, {FEATURES_LEFT_OUT: left_out} if left_out else {}


def _rows(dataset: LeRobotDataset, location: EpisodeLocation, where: str) -> pa.Table:
    """The rows of one episode, ordered by frame."""
    path = layout.inside(dataset.root, location.data)
    if not path.is_file():
        raise DataError(f"{where}: the file {path} is missing")
    table = pq.read_table(path, filters=[("episode_index", "=", location.number)]).sort_by("frame_index")
    frames = table["frame_index"].to_pylist()
    if frames != list(range(location.length)):
        raise DataError(f"{where}: {path} has {len(frames)} of its {location.length} frames, or not in order")
    return table


def _images(root: Path, column: pa.ChunkedArray, where: str) -> Column:
    shown = []
    for step, entry in enumerate(column.to_pylist()):
        content = entry["bytes"] if entry["bytes"] else layout.inside(root, entry["path"]).read_bytes()
        shown.append(images.from_file(content, f"{where}, step {step}"))
        if shown[-1].shape != shown[0].shape:
            raise DataError(f"{where} has images of different sizes (step {step})")
    return np.stack(shown)


def _taken(columns: dict[str, Column], name: str, where: str) -> Column:
    if name not in columns:
        raise DataError(f"{where} has no feature {name!r}")
    return columns.pop(name)


def _rewards(columns: dict[str, Column], length: int) -> tuple[Column, dict[str, bool]]:
    if layout.REWARD in columns:
        return columns.pop(layout.REWARD).reshape(length), {}
    if layout.SUCCESS in columns:
        return columns[layout.SUCCESS].reshape(length).astype(np.float32), {}
    return (np.arange(length) == length - 1).astype(np.float32), {SUCCESS_ASSUMED: True}


def _named(observations: Mapping[str, Column]) -> dict[str, Column]:
    """Observation names without LeRobot's prefixes, unless that makes two names equal."""
    short = {name: name.removeprefix(layout.IMAGES).removeprefix(layout.OBSERVATION) for name in observations}
    if len(set(short.values())) < len(short):
        short = {name: name.removeprefix(layout.OBSERVATION) for name in observations}
    return {short[name]: column for name, column in observations.items()}
