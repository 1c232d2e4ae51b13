"""Reads LeRobot datasets, v3.0 and v2.1."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nightshift import files
from nightshift.data import episode as episodes_module
from nightshift.data import limits as unpacking
from nightshift.data import symlinks, tensors
from nightshift.data.episode import NO_POLICY, Episode, with_last
from nightshift.data.formats import REPEATED_FINAL, SUCCESS_ASSUMED, EpisodeRef, common, reading
from nightshift.data.formats.lerobot import images, layout, parquet, tables
from nightshift.data.formats.lerobot.layout import Feature
from nightshift.data.limits import Limits
from nightshift.data.rate import FPS, is_rate
from nightshift.data.tensors import Column
from nightshift.errors import DataError

SOURCE = "lerobot"
FEATURES_LEFT_OUT = "features_left_out"
"""Metadata key: names of the text features, which are not imported."""

_EXPORT_CHANGED = (
    "export it again, or delete its manifest.json and its folder nightshift to read it as any other LeRobot dataset"
)
_AGAIN = "download the dataset again"
_COUNTERS = ("frame_index", "episode_index", "index")


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
    limits: Limits
    verify: Callable[[str], None] | None  # of our own export: compares a file with its checksum, once
    info: Mapping[str, Any]
    features: Mapping[str, Feature]

    @property
    def fps(self) -> float:
        return float(self.info["fps"])

    @property
    def videos(self) -> list[str]:
        return [name for name, feature in self.features.items() if feature.dtype == "video"]

    def file(self, relative: str) -> Path:
        """A file of the dataset, which may be opened; of our own export only if it is as we wrote it."""
        path = symlinks.check(self.root / relative, self.root)
        if not path.is_file():
            raise DataError(f"the file {path} is missing", _AGAIN)
        if self.verify:
            self.verify(relative)
        return path


def list_episodes(path: Path, task: str, limits: Limits = unpacking.DEFAULT) -> list[EpisodeRef]:
    with reading(str(path / "meta")):
        if not (path / layout.INFO).is_file():
            raise DataError(f"{path} is not a LeRobot dataset: it has no {layout.INFO}", "give the folder that has it")
        dataset = _open(path, limits)
        rows = _rows_of_v3 if dataset.info["codebase_version"] == layout.VERSION else _rows_of_v2
        listed, errors = rows(dataset)
        repeated = [number for number, count in Counter(row["episode_index"] for row in listed).items() if count > 1]
        errors += [_repeated(dataset, number) for number in sorted(repeated)]
        errors += _missing(dataset, {row["episode_index"] for row in listed})
        load = partial(_load_export, dataset) if dataset.verify else partial(_load, dataset, task=task)
        found = [_ref(dataset, row, load) for row in listed if row["episode_index"] not in repeated]
        first = max((row["episode_index"] for row in listed), default=-1) + 1
    broken = [EpisodeRef.broken(common.episode_key(first + n, "broken"), error) for n, error in enumerate(errors)]
    return found + broken


def _ref(dataset: LeRobotDataset, row: Mapping[str, Any], load: Any) -> EpisodeRef:
    where = f"{dataset.root}, episode {row['episode_index']}"
    key = common.episode_key(row["episode_index"], "episode")
    try:
        return EpisodeRef(key=key, where=where, read=partial(load, _location(dataset, row, where)))
    except DataError as error:
        return EpisodeRef.broken(key, error)


def _open(root: Path, limits: Limits) -> LeRobotDataset:
    info = common.read_json(root / layout.INFO, root)
    version, fps = info["codebase_version"], info["fps"]
    if version not in (layout.VERSION, layout.OLD_VERSION):
        raise DataError(
            f"{root} is a LeRobot dataset of version {version}, not {layout.VERSION} or {layout.OLD_VERSION}",
            "convert it with LeRobot's own scripts",
        )
    if not is_rate(fps):
        raise DataError(f"{root / layout.INFO}: fps is {fps!r}, not a positive number", "correct it")
    is_export = (root / layout.SIDECAR_FOLDER).is_dir()
    return LeRobotDataset(
        root=root,
        limits=limits,
        verify=lru_cache(maxsize=None)(partial(_verify, root)) if is_export else None,
        info=info,
        features=layout.parse_features(info["features"], str(root / layout.INFO)),
    )


def _verify(root: Path, relative: str) -> None:
    """Compare a file of our own export with its checksum."""
    symlinks.check(root / files.MANIFEST, root)
    files.verify_folder(root, _EXPORT_CHANGED, only=[relative])


def _rows_of_v3(dataset: LeRobotDataset) -> tuple[list[dict[str, Any]], list[DataError]]:
    """The rows about episodes, and errors for the files that cannot be read."""
    rows: list[dict[str, Any]] = []
    errors = []
    for path in sorted((dataset.root / layout.EPISODES).rglob("*.parquet")):
        try:
            with reading(str(path)):
                file = dataset.file(str(path.relative_to(dataset.root)))
                rows += _checked(parquet.read_rows(file, "stats/", dataset.limits), str(path))
        except DataError as error:
            errors.append(error)
    return sorted(rows, key=lambda row: int(row["episode_index"])), errors


def _rows_of_v2(dataset: LeRobotDataset) -> tuple[list[dict[str, Any]], list[DataError]]:
    path = dataset.file(str(layout.OLD_EPISODES))
    lines = [json.loads(line) for line in common.read_text(path).split("\n") if line.strip()]
    return list(_checked(lines, str(path))), []


def _checked(rows: Iterable[dict[str, Any]], where: str) -> Iterator[dict[str, Any]]:
    for place, row in enumerate(rows):
        number = row.get("episode_index")
        if type(number) is not int or number < 0:
            raise DataError(f"{where}, row {place}: episode_index is {number!r}, not a whole number", _AGAIN)
        yield row


def _repeated(dataset: LeRobotDataset, number: int) -> DataError:
    return DataError(
        f"{dataset.root / 'meta'} lists episode {number} more than once, so its frames are ambiguous",
        "give every episode an index of its own",
    )


def _missing(dataset: LeRobotDataset, listed: set[int]) -> list[DataError]:
    """An error if the dataset lists another number of episodes than info.json says."""
    total = dataset.info.get("total_episodes", len(listed))
    if total == len(listed):
        return []
    missing = next((number for number in range(len(listed) + 1) if number not in listed), None)
    which = f"; the first that is missing is {missing}" if len(listed) < total else ""
    return [
        DataError(
            f"{dataset.root / 'meta'} lists {len(listed)} of {total} episodes{which}", f"{_AGAIN}: it is incomplete"
        )
    ]


def _location(dataset: LeRobotDataset, row: Mapping[str, Any], where: str) -> EpisodeLocation:
    number, length, tasks = row["episode_index"], row.get("length"), row.get("tasks")
    if type(length) is not int or length < 1:
        raise DataError(f"{where}: its length is {length!r}, not a number of frames", _AGAIN)
    if not isinstance(tasks, list) or not all(isinstance(task, str) for task in tasks):
        raise DataError(f"{where}: its tasks are {tasks!r:.80}, not texts", _AGAIN)
    with reading(where):
        return EpisodeLocation(
            number=number,
            length=length,
            tasks=tasks,
            data=layout.fill(dataset.info["data_path"], _indices(dataset, row, "data/")),
            videos={key: _video(dataset, row, key) for key in dataset.videos},
        )


def _video(dataset: LeRobotDataset, row: Mapping[str, Any], key: str) -> tuple[str, float]:
    prefix = f"videos/{key}/"
    path = layout.fill(dataset.info["video_path"], {"video_key": key, **_indices(dataset, row, prefix)})
    return path, float(row.get(f"{prefix}from_timestamp", 0.0))


def _indices(dataset: LeRobotDataset, row: Mapping[str, Any], prefix: str) -> dict[str, int]:
    """The numbers in the name of a file: of version 3 in the row, of version 2.1 those of the episode."""
    if dataset.info["codebase_version"] == layout.VERSION:
        return {name: int(row[f"{prefix}{name}"]) for name in ("chunk_index", "file_index")}
    number = row["episode_index"]
    return {"episode_chunk": number // int(dataset.info["chunks_size"]), "episode_index": number}


def _load(dataset: LeRobotDataset, location: EpisodeLocation, task: str) -> Episode:
    where = f"{dataset.root}, episode {location.number}"
    columns, left_out = _columns(dataset, location, where)
    actions = common.action_matrix(_taken(columns, layout.ACTION, where), f"{where}: {layout.ACTION}")
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
    path = dataset.file(str(layout.sidecar(location.number)))
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
    features = {
        name: feature
        for name, feature in dataset.features.items()
        if name not in _COUNTERS and (wanted is None or name in wanted)
    }
    videos = {name: dataset.file(location.videos[name][0]) for name in dataset.videos if name in features}
    _check_cameras(dataset, location, features, [*videos.values(), dataset.file(location.data)], where)
    table = _frames(dataset, location, [*(name for name in features if name not in videos), "timestamp"], where)
    left_out, columns = [], {}
    for name, feature in features.items():
        place = f"{where}: {name}"
        if feature.dtype == "video":
            times = location.videos[name][1] + tables.to_numpy(table["timestamp"], (), f"{where}: timestamp")
            columns[name] = images.read_video(videos[name], times.tolist(), dataset.fps, feature.shape, place)
        elif feature.dtype == "image":
            columns[name] = _images(dataset, table[name], feature.shape, place)
        elif pa.types.is_string(table[name].type) or pa.types.is_large_string(table[name].type):
            left_out.append(name)
        else:
            columns[name] = _numbers(table[name], feature, place)
    return columns, {FEATURES_LEFT_OUT: left_out} if left_out else {}


def _check_cameras(
    dataset: LeRobotDataset,
    location: EpisodeLocation,
    features: Mapping[str, Feature],
    paths: Sequence[Path],
    where: str,
) -> None:
    """Check the size of the decoded images of an episode before anything is decoded."""
    frame = sum(math.prod(feature.shape) for feature in features.values() if feature.dtype in ("image", "video"))
    dataset.limits.check_episode(frame * location.length, sum(path.stat().st_size for path in paths), where)


def _frames(dataset: LeRobotDataset, location: EpisodeLocation, names: Sequence[str], where: str) -> pa.Table:
    """These columns of the frames of one episode, in order."""
    path = dataset.file(location.data)
    wanted = [*dict.fromkeys([*names, "frame_index"])]
    table = parquet.read_where(path, "episode_index", location.number, wanted, dataset.limits)
    frames = tables.to_numpy(table["frame_index"], (), f"{where}: frame_index")
    if not np.array_equal(np.sort(frames), np.arange(len(frames))) or len(frames) != location.length:
        raise DataError(
            f"{where}: {path} has {len(frames)} of its {location.length} frames, or some of them twice", _AGAIN
        )
    return table.take(np.argsort(frames))


def _numbers(column: pa.ChunkedArray, feature: Feature, where: str) -> Column:
    found = common.native_dtype(tables.to_numpy(column, feature.shape, where), where)
    if found.dtype.name != feature.dtype:
        raise DataError(f"{where} is {found.dtype}, but {feature.dtype} is declared", "correct meta/info.json")
    return found


def _images(dataset: LeRobotDataset, column: pa.ChunkedArray, shape: tuple[int, ...], where: str) -> Column:
    shown = []
    for step, entry in enumerate(column.to_pylist()):
        content, place = (entry or {}).get("bytes"), f"{where}, step {step}"
        if not content:
            content = dataset.file(str((entry or {}).get("path"))).read_bytes()
        shown.append(images.from_file(content, shape, place))
        if shown[-1].dtype != shown[0].dtype:
            raise DataError(
                f"{place} is {shown[-1].dtype}, and step 0 is {shown[0].dtype}", "convert the dataset again"
            )
    return np.stack(shown)


def _taken(columns: dict[str, Column], name: str, where: str) -> Column:
    if name not in columns:
        raise DataError(f"{where} has no feature {name!r}", "add it, or leave the dataset out")
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
