"""Read LeRobot datasets, v3.0 and v2.1."""

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
from nightshift.data.formats import REPEATED_FINAL, SUCCESS_ASSUMED, Entry, common
from nightshift.data.formats.lerobot import layout, pictures, tables
from nightshift.data.formats.lerobot.writing import FPS
from nightshift.data.tensors import Column
from nightshift.errors import DataError

SOURCE = "lerobot"
LEFT_OUT = "features_left_out"
"""Names of the features that hold text."""

_DAMAGE = (ValueError, KeyError, TypeError, IndexError, AttributeError, OSError, pa.ArrowException)
_CHANGED = (
    "export it again, or delete its manifest.json and its folder nightshift to read it as any other LeRobot dataset"
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one episode lies: paths relative to the dataset."""

    number: int
    length: int
    tasks: Sequence[str]
    data: str
    films: Mapping[str, tuple[str, float]]  # by feature: the file, and the second at which the episode begins


@dataclass(frozen=True, kw_only=True)
class Source:
    root: Path
    fps: float
    features: Mapping[str, Mapping[str, Any]]
    places: Sequence[Place]


def entries(path: Path, task: str) -> list[Entry]:
    if not (path / layout.INFO).is_file():
        raise DataError(f"{path} is not a LeRobot dataset: it has no {layout.INFO}")
    ours = (path / layout.OURS).is_dir()
    if ours:
        files.verify_folder(path, _CHANGED)
    try:
        source = _open(path)
    except _DAMAGE as error:
        raise DataError(f"{path / 'meta'} is damaged or laid out in another way: {error!r}") from None
    load = partial(_load_ours, source) if ours else partial(_load, source, task=task)
    return [
        Entry(key=common.key(place.number, "episode"), load=partial(_guarded, load, source, place))
        for place in source.places
    ]


def _guarded(load: Any, source: Source, place: Place) -> Episode:
    """What a damaged file makes Arrow say, as a sentence."""
    try:
        found: Episode = load(place)
    except _DAMAGE as error:
        where = f"{source.root / place.data}, episode {place.number}"
        raise DataError(f"{where} is damaged or laid out in another way: {error!r}") from None
    return found


def _open(root: Path) -> Source:
    info = json.loads((root / layout.INFO).read_text())
    version = info["codebase_version"]
    if version == layout.VERSION:
        places = _places(root, info)
    elif version == layout.OLD_VERSION:
        places = _old_places(root, info)
    else:
        raise DataError(
            f"{root} is a LeRobot dataset of version {version}, not {layout.VERSION} or {layout.OLD_VERSION}",
            "convert it with LeRobot's own scripts",
        )
    return Source(root=root, fps=info["fps"], features=info["features"], places=places)


def _places(root: Path, info: Mapping[str, Any]) -> list[Place]:
    films = [name for name, feature in info["features"].items() if feature["dtype"] == "video"]
    rows = []
    for file in sorted((root / layout.EPISODES).rglob("*.parquet")):
        names = [name for name in pq.read_schema(file).names if not name.startswith("stats/")]
        rows += pq.read_table(file, columns=names).to_pylist()
    return [
        Place(
            number=row["episode_index"],
            length=row["length"],
            tasks=row["tasks"],
            data=info["data_path"].format(chunk_index=row["data/chunk_index"], file_index=row["data/file_index"]),
            films={
                key: (
                    info["video_path"].format(
                        video_key=key,
                        chunk_index=row[f"videos/{key}/chunk_index"],
                        file_index=row[f"videos/{key}/file_index"],
                    ),
                    row[f"videos/{key}/from_timestamp"],
                )
                for key in films
            },
        )
        for row in sorted(rows, key=lambda row: row["episode_index"])
    ]


def _old_places(root: Path, info: Mapping[str, Any]) -> list[Place]:
    films = [name for name, feature in info["features"].items() if feature["dtype"] == "video"]
    rows = [json.loads(line) for line in (root / layout.OLD_EPISODES).read_text().splitlines()]
    places = []
    for row in rows:
        number = row["episode_index"]
        names = {"episode_chunk": number // info["chunks_size"], "episode_index": number}
        places.append(
            Place(
                number=number,
                length=row["length"],
                tasks=row["tasks"],
                data=info["data_path"].format(**names),
                films={key: (info["video_path"].format(video_key=key, **names), 0.0) for key in films},
            )
        )
    return places


def _load(source: Source, place: Place, task: str) -> Episode:
    where = f"{source.root}, episode {place.number}"
    columns, left_out = _columns(source, place, where)
    actions = _taken(columns, layout.ACTION, where)
    rewards, assumed = _rewards(columns, place.length)
    success = bool(columns[layout.SUCCESS][-1]) if layout.SUCCESS in columns else bool(rewards[-1] > 0)
    truncated = bool(columns[layout.TRUNCATED][-1]) if layout.TRUNCATED in columns else not success
    language = "; ".join(place.tasks)
    interventions = columns.pop(layout.INTERVENTION, np.zeros(place.length, np.bool_))
    observed = {name: columns.pop(name) for name in list(columns) if f"{name}.".startswith(layout.OBSERVATION)}
    return Episode(
        observations=_named({name: with_last(seen, seen[-1]) for name, seen in observed.items()}),
        actions=with_last(actions),
        rewards=with_last(rewards),
        discounts=np.ones(place.length + 1, np.float32),
        interventions=with_last(interventions.reshape(place.length) != 0),
        policy_actions=with_last(actions),
        policy_versions=np.full(place.length + 1, NO_POLICY, np.int64),
        terminated=not truncated,
        truncated=truncated,
        success=success,
        provenance=common.provenance(
            source=SOURCE,
            path=source.root,
            place=str(place.number),
            task=common.chosen_task("", task or "_".join(language.split()), where),
            language=language,
        ),
        extras={name: with_last(column) for name, column in columns.items()},
        metadata={REPEATED_FINAL: True, FPS: source.fps, **assumed, **left_out},
    )


def _load_ours(source: Source, place: Place) -> Episode:
    """Exactly what was written."""
    path = source.root / layout.remainder(place.number)
    rest, note = tensors.read(path)
    described = json.loads(note)
    features = set(described["features"].values())
    found, _ = _columns(source, place, str(path), features)
    columns = {name.removeprefix("whole."): column for name, column in rest.items() if name.startswith("whole.")}
    for name, feature in described["features"].items():
        last = rest[f"last.{name}"]
        columns[name] = np.concatenate([found[feature].reshape(place.length, *last.shape[1:]), last])
    return episodes_module.assemble(columns, described["header"])


def _columns(
    source: Source, place: Place, where: str, wanted: set[str] | None = None
) -> tuple[dict[str, Column], dict[str, list[str]]]:
    """The wanted features of an episode as arrays [T, …], and the names of those that are text."""
    table = _rows(source, place, where)
    seconds = tables.to_numpy(table["timestamp"], f"{where}: timestamp")
    left_out = []
    columns: dict[str, Column] = {}
    for name, feature in source.features.items():
        if name in ("frame_index", "episode_index", "index") or (wanted is not None and name not in wanted):
            continue
        if feature["dtype"] == "video":
            file, start = place.films[name]
            film = layout.inside(source.root, file)
            columns[name] = pictures.read_film(film, (start + seconds).tolist(), source.fps, f"{where}: {name}")
        elif feature["dtype"] == "image":
            columns[name] = _pictures(source.root, table[name], f"{where}: {name}")
        elif pa.types.is_string(table[name].type) or pa.types.is_large_string(table[name].type):
            left_out.append(name)
        else:
            flat = common.checked(tables.to_numpy(table[name], f"{where}: {name}"), f"{where}: {name}")
            columns[name] = flat.reshape(place.length, *feature["shape"])
    return columns, {LEFT_OUT: left_out} if left_out else {}


def _rows(source: Source, place: Place, where: str) -> pa.Table:
    """The frames of one episode in their order."""
    path = layout.inside(source.root, place.data)
    if not path.is_file():
        raise DataError(f"{where}: there is no file {path}")
    table = pq.read_table(path, filters=[("episode_index", "=", place.number)]).sort_by("frame_index")
    frames = table["frame_index"].to_pylist()
    if frames != list(range(place.length)):
        raise DataError(f"{where}: {path} holds {len(frames)} of its {place.length} frames, or not in one piece")
    return table


def _pictures(root: Path, column: pa.ChunkedArray, where: str) -> Column:
    shown = []
    for step, entry in enumerate(column.to_pylist()):
        content = entry["bytes"] if entry["bytes"] else layout.inside(root, entry["path"]).read_bytes()
        shown.append(pictures.from_file(content, f"{where}, step {step}"))
        if shown[-1].shape != shown[0].shape:
            raise DataError(f"{where} has pictures of different sizes (step {step})")
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
    """Without LeRobot's prefixes, unless two would be called the same."""
    short = {name: name.removeprefix(layout.IMAGES).removeprefix(layout.OBSERVATION) for name in observations}
    if len(set(short.values())) < len(short):
        short = {name: name.removeprefix(layout.OBSERVATION) for name in observations}
    return {short[name]: column for name, column in observations.items()}
