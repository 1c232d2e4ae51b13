"""Reads and writes RLDS as TFDS stores it, in TFRecord files, without TensorFlow.

FOLDER/  dataset_info.json                              name, splits, episodes per shard
         features.json                                  the features of an episode and of its steps
         NAME-SPLIT.tfrecord-00000-of-00002             one record per episode; step features are concatenated

Writing is lossless: fields that RLDS does not define are additional step features, and everything that is not an array
is JSON in the metadata of the episode. Reading such a dataset returns the same episodes.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nightshift import files
from nightshift.data import episode as episodes_
from nightshift.data import limits as unpacking
from nightshift.data import rlds, symlinks
from nightshift.data.episode import Episode
from nightshift.data.formats import EpisodeRef, common, reading, rlds_external, tf_example, tfds_features, tfrecord
from nightshift.data.formats.rlds_external import LANGUAGE, DecodedRecord, TfdsSplit
from nightshift.data.formats.tf_example import NotAnExample, Values
from nightshift.data.formats.tfds_features import TEXT, BadFeature, Feature
from nightshift.data.formats.tfrecord import Record
from nightshift.data.limits import Limits
from nightshift.data.schema import Schema
from nightshift.data.tensors import Column
from nightshift.errors import DataError

INFO = "dataset_info.json"
FEATURES = "features.json"
NAME = "nightshift_episodes"
SHARD_BYTES = 256 * 2**20

_STEPS = "steps/"
_HEADER = "episode_metadata/nightshift"
_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
_REMEDY = "give the folder of one version of a TFDS dataset, the one that holds dataset_info.json"
_PARSE_ERRORS = (KeyError, TypeError, ValueError, AttributeError, RecursionError)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The features of a dataset, by path."""

    steps: Mapping[str, Feature]
    episode: Mapping[str, Feature]

    @property
    def is_ours(self) -> bool:
        return _HEADER in self.episode


def list_episodes(path: Path, task: str, limits: Limits = unpacking.DEFAULT) -> Sequence[EpisodeRef]:
    """The episodes of all splits; only those of the split "train" are for training.

    A key consists of split, shard and record number. Listing reads the record headers only.
    """
    with reading(str(path)):
        info = _json(path / INFO)
        layout = _layout(path / FEATURES)
        rlds_external.check_steps(layout.steps, str(path / FEATURES))
        if not layout.is_ours:
            rlds_external.check_task(layout.steps, task, str(path / FEATURES))
        return list(_entries(path, info, partial(_load, layout=layout, task=task, limits=limits)))


def write(path: Path, episodes: Iterable[Episode], shard_bytes: int = SHARD_BYTES) -> None:
    """All episodes must have the schema of the first; provenance.split is the split, "train" or "eval"."""
    schema: Schema | None = None
    layout: Layout | None = None
    splits: dict[str, _Split] = {}
    with files.new_folder(path) as new:
        for number, episode in enumerate(episodes):
            if schema is None or layout is None:
                schema, layout = Schema.of(episode), _layout_of(episode)
                files.write_json(new / FEATURES, _features_json(layout, path))
            schema.check(episode, f"episode {number} for {path}")
            split = splits.setdefault(episode.provenance.split, _Split(new, episode.provenance.split, shard_bytes))
            split.append(tf_example.encode(_features(episode, layout)))
        if schema is None:
            raise DataError(f"there are no episodes to write to {path}", "choose another split or source")
        files.write_json(new / INFO, _info_json([split.finish() for split in splits.values()]))


def _entries(path: Path, info: Mapping[str, Any], load: Callable[..., Episode]) -> Iterator[EpisodeRef]:
    try:
        shards = list(_shards(path, info))
    except _PARSE_ERRORS as error:
        raise DataError(f"{path / INFO} is not the description of a TFDS dataset: {error!r}", _REMEDY) from None
    if not shards:
        raise DataError(f"{path / INFO} lists no shards of episodes", _REMEDY)
    for split, shard, file, count in shards:
        prefix = f"{common.name_in_key(split.name)}-{shard:05d}"
        records, damage = _records(file, count, path)
        for record in records:
            read = partial(load, record, split=split)
            yield EpisodeRef(key=f"{prefix}-{record.number:06d}", where=record.label, read=read)
        if damage:
            yield EpisodeRef.broken(f"{prefix}-{len(records):06d}", damage)


def _records(file: Path, count: int, root: Path) -> tuple[list[Record], DataError | None]:
    """The records of a shard up to the first damage, and what is wrong with it."""
    try:
        found, error = tfrecord.scan_until_damage(symlinks.check(file, root))
    except DataError as refusal:
        return [], refusal
    if not error and len(found) != count:
        said = f"{file} holds {len(found)} episodes; {INFO} says {count}"
        return found, DataError(said, "download the dataset again: it is incomplete")
    return found, error


def _shards(path: Path, info: Mapping[str, Any]) -> Iterator[tuple[TfdsSplit, int, Path, int]]:
    """The shards of all splits: split, number, file, and number of episodes."""
    if (kind := info.get("fileFormat", "tfrecord")) != "tfrecord":
        raise DataError(f"{path} holds {kind} files", "prepare the dataset with TFDS' file_format='tfrecord'")
    for entry in info["splits"]:
        split = TfdsSplit(dataset=info["name"], version=str(info.get("version", "")), name=entry["name"])
        lengths = [int(length) for length in entry.get("shardLengths", ())]
        for shard, length in enumerate(lengths):
            name = _file_name(entry.get("filepathTemplate", _TEMPLATE), split, shard, len(lengths))
            yield split, shard, path / name, length


def _file_name(template: str, split: TfdsSplit, shard: int, shards: int) -> str:
    values = {
        "DATASET": split.dataset,
        "SPLIT": split.name,
        "FILEFORMAT": "tfrecord",
        "SHARD_INDEX": f"{shard:05d}",
        "NUM_SHARDS": f"{shards:05d}",
        "SHARD_X_OF_Y": f"{shard:05d}-of-{shards:05d}",
    }
    for variable, value in values.items():
        template = template.replace(f"{{{variable}}}", value)
    if "{" in template or Path(template).name != template:
        raise ValueError(f"no file is named {template!r}")
    return template


def _load(record: Record, *, split: TfdsSplit, layout: Layout, task: str, limits: Limits) -> Episode:
    where = record.label
    limits.check_episode(record.length, record.length, where)
    try:
        values = tf_example.decode(tfrecord.read(record))
    except NotAnExample as error:
        raise DataError(f"{where} is not a tf.train.Example: {error}") from None
    count = len(_feature(values, f"{_STEPS}is_first", where))
    if not count:
        raise DataError(f"{where} is an episode without steps", "leave it out")
    _check_size(record, layout, values, count, limits)
    steps = {n: _decoded(f, values, f"{_STEPS}{n}", count, where) for n, f in layout.steps.items()}
    about = {n: _decoded(f, values, n, 1, where)[0] for n, f in layout.episode.items()}
    if not layout.is_ours:
        return rlds_external.episode(DecodedRecord(steps=steps, about=about), split, task, record)
    try:
        columns = {name: column for name, column in steps.items() if not isinstance(column, list)}
        return rlds.from_fields(columns, json.loads(about[_HEADER]), where)
    except _PARSE_ERRORS as error:
        raise DataError(f"{where} is not an episode as Nightshift writes it: {error!r}") from None


def _check_size(record: Record, layout: Layout, values: Mapping[str, Values], count: int, limits: Limits) -> None:
    """Check what the features of a record decode to before they are decoded."""
    named = [
        *((f"{_STEPS}{name}", feature, count) for name, feature in layout.steps.items()),
        *((name, feature, 1) for name, feature in layout.episode.items()),
    ]
    total = 0
    for name, feature, number in named:
        with _naming(name, record.label):
            total += tfds_features.nbytes(feature, _feature(values, name, record.label), number)
    limits.check_episode(total, record.length, record.label)


def _decoded(feature: Feature, values: Mapping[str, Values], name: str, count: int, where: str) -> Any:
    with _naming(name, where):
        return tfds_features.decode(feature, _feature(values, name, where), count)


@contextlib.contextmanager
def _naming(name: str, where: str) -> Iterator[None]:
    """Add the location to a BadFeature."""
    try:
        yield
    except BadFeature as error:
        raise DataError(f"{where}: {name} {error}", "prepare the dataset again") from None


def _feature(values: Mapping[str, Values], name: str, where: str) -> Values:
    if name not in values:
        raise DataError(f"{where}: {name} is missing, though {FEATURES} declares it", "prepare the dataset again")
    return values[name]


def _layout(path: Path) -> Layout:
    declared = _json(path)
    try:
        top = dict(declared["featuresDict"]["features"])
        steps = top.pop("steps")
        if not steps["pythonClassName"].endswith(".Dataset"):
            raise BadFeature(f"steps is a feature of kind {steps['pythonClassName']}, not a Dataset")
        return Layout(
            steps=dict(tfds_features.parse(steps["sequence"]["feature"])),
            episode=dict(tfds_features.parse(tfds_features.features_dict(top))),
        )
    except BadFeature as error:
        raise DataError(f"{path}: {error}", "prepare the dataset without this feature") from None
    except _PARSE_ERRORS as error:
        raise DataError(f"{path} does not declare the features of RLDS episodes: {error!r}", _REMEDY) from None


def _json(path: Path) -> Any:
    if not path.is_file():
        raise DataError(f"{path} cannot be read: there is no such file", _REMEDY)
    return common.read_json(path, path.parent)


def _layout_of(episode: Episode) -> Layout:
    steps = {name: tfds_features.feature_of(column) for name, column in rlds.to_fields(episode).items()}
    return Layout(steps={**steps, LANGUAGE: TEXT}, episode={_HEADER: TEXT})


def _features(episode: Episode, layout: Layout) -> dict[str, Values]:
    fields: dict[str, Column | list[str]] = {
        **rlds.to_fields(episode),
        LANGUAGE: [episode.provenance.language] * episode.length,
    }
    steps = {f"{_STEPS}{name}": tfds_features.encode(f, fields[name]) for name, f in layout.steps.items()}
    return {**steps, _HEADER: [json.dumps(episodes_.header(episode)).encode()]}


def _features_json(layout: Layout, path: Path) -> dict[str, Any]:
    try:
        top = tfds_features.to_json(layout.episode)
        top["featuresDict"]["features"]["steps"] = tfds_features.steps_json(layout.steps)
    except BadFeature as error:
        raise DataError(f"{path} cannot be written: {error}", "rename the observation or extra") from None
    return top


def _info_json(splits: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "name": NAME,
        "version": "1.0.0",
        "description": "Episodes of Nightshift as RLDS.",
        "fileFormat": "tfrecord",
        "splits": splits,
    }


class _Split:
    """Writes the shards of one split; shard names contain the number of shards, so they are renamed at the end."""

    def __init__(self, folder: Path, name: str, shard_bytes: int) -> None:
        self._folder = folder
        self._name = name
        self._shard_bytes = shard_bytes
        self._lengths: list[int] = []
        self._total = self._in_shard = 0

    def append(self, record: bytes) -> None:
        content = tfrecord.frame_record(record)
        if not self._lengths or self._in_shard + len(content) > self._shard_bytes:
            self._lengths.append(0)
            self._in_shard = 0
        with self._temporary_path(len(self._lengths) - 1).open("ab") as stream:
            stream.write(content)
        self._lengths[-1] += 1
        self._in_shard += len(content)
        self._total += len(record)

    def finish(self) -> dict[str, Any]:
        """Rename the shards and return the entry of the split for dataset_info.json."""
        split = TfdsSplit(dataset=NAME, version="", name=self._name)
        for shard in range(len(self._lengths)):
            self._temporary_path(shard).rename(self._folder / _file_name(_TEMPLATE, split, shard, len(self._lengths)))
        return {
            "name": self._name,
            "filepathTemplate": _TEMPLATE,
            "numBytes": str(self._total),
            "shardLengths": [str(length) for length in self._lengths],
        }

    def _temporary_path(self, shard: int) -> Path:
        return self._folder / f"{self._name}-{shard:05d}"
