"""A dataset on disk: two splits of episodes, their statistics, and a manifest of sha256 sums.

data/dataset/  train.safetensors, validation.safetensors   every field of all episodes, end to end
               schema.json       dtype, shape and range of every field
               index.json        every episode: split, length, how it ended, provenance
               statistics.json   mean, std, min, max of what a policy learns from, over the training split
               manifest.json     sha256 of each file, written last
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nightshift import files
from nightshift.data import episode as episodes
from nightshift.data import tensors
from nightshift.data.episode import OBSERVATIONS, Episode
from nightshift.data.schema import Schema
from nightshift.data.shelf import SCHEMA
from nightshift.data.tensors import SUFFIX, Column
from nightshift.errors import DataError
from nightshift.types import Array

INDEX = "index.json"
STATISTICS = "statistics.json"
REMEDY = "run `dvc checkout` to restore it, or `nightshift run` to make it again"

Part = Literal["train", "validation"]
PARTS: tuple[Part, Part] = ("train", "validation")


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Every step of a split at which somebody acted, episodes end to end: N steps."""

    observations: Mapping[str, Array]  # each [N, D]
    actions: Array  # [N, C, A] to imitate from there on
    mask: NDArray[np.bool_]  # [N, C] those that belong to the same episode


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A dataset that was checked; arrays are views of its files until they are used."""

    schema: Schema
    statistics: Mapping[str, Mapping[str, Any]]
    """By field ("actions", "observations.proprio", ...): mean, std, min, max, each a list."""
    _columns: Mapping[Part, Mapping[str, Column]]
    _index: Mapping[Part, Sequence[Mapping[str, Any]]]

    @property
    def observations(self) -> list[str]:
        return [name.removeprefix(OBSERVATIONS) for name in self.schema.fields if name.startswith(OBSERVATIONS)]

    def steps(self, part: Part, names: Sequence[str], chunk: int = 1) -> Steps:
        """What a policy that sees the observations `names` and acts in chunks learns from."""
        lengths = [entry["length"] for entry in self._index[part]]
        learned = _learned(self._columns[part], lengths, names)
        actions = learned.pop("actions")
        ahead, mask = _ahead(lengths, chunk)
        return Steps(
            observations={k.removeprefix(OBSERVATIONS): v for k, v in learned.items()},
            actions=actions[ahead],
            mask=mask,
        )

    def episodes(self, part: Part) -> Iterator[Episode]:
        """The episodes as they were written."""
        start = 0
        for entry in self._index[part]:
            end = start + entry["length"]
            yield episodes.assemble({name: c[start:end] for name, c in self._columns[part].items()}, entry)
            start = end


def write(path: Path, parts: Mapping[Part, Sequence[Episode]], schema: Schema) -> None:
    """`schema` is what every episode was checked against."""
    columns = {part: _joined(parts[part], schema) for part in PARTS}
    lengths = [episode.length for episode in parts["train"]]
    with files.new_folder(path) as new:
        for part in PARTS:
            tensors.write(new / f"{part}{SUFFIX}", columns[part], "")
        files.write_json(new / SCHEMA, schema.to_json())
        files.write_json(new / STATISTICS, _statistics(_learned(columns["train"], lengths, _vectors(schema))))
        files.write_json(new / INDEX, {"episodes": [_entry(e, part) for part in PARTS for e in parts[part]]})


def read(path: Path) -> Dataset:
    """The dataset, after checking every file against the manifest."""
    files.verify_folder(path, REMEDY)
    try:
        index = json.loads((path / INDEX).read_text())["episodes"]
        return Dataset(
            schema=Schema.from_json(json.loads((path / SCHEMA).read_text()), str(path / SCHEMA)),
            statistics=json.loads((path / STATISTICS).read_text()),
            _columns={part: tensors.read(path / f"{part}{SUFFIX}")[0] for part in PARTS},
            _index={part: [entry for entry in index if entry["part"] == part] for part in PARTS},
        )
    except FileNotFoundError as error:
        raise DataError(
            f"{path} was written by another version: it has no {Path(error.filename).name}", REMEDY
        ) from None


def describe(index: bytes) -> dict[str, Any]:
    """What a version holds, from its index.json: episodes and steps by task and split, sources, versions."""
    entries = json.loads(index)["episodes"]
    tasks = Counter((e["provenance"]["task"], e["part"]) for e in entries)
    steps = Counter[tuple[str, str]]()
    for e in entries:
        steps[e["provenance"]["task"], e["part"]] += e["length"]
    return {
        "episodes": len(entries),
        "steps": sum(steps.values()),
        "rows": [(task, part, count, steps[task, part]) for (task, part), count in sorted(tasks.items())],
        "sources": sorted({e["provenance"]["source"] for e in entries}),
        "suites": sorted({e["provenance"]["suite"] for e in entries}),
        "commits": sorted({e["provenance"]["commit"] for e in entries}),
        "versions": sorted({f"{k} {v}" for e in entries for k, v in e["provenance"]["versions"].items()}),
    }


def _joined(parts: Sequence[Episode], schema: Schema) -> dict[str, Column]:
    columns = [episodes.columns(episode) for episode in parts]
    return {name: np.concatenate([column[name] for column in columns]) for name in schema.fields}


def _vectors(schema: Schema) -> list[str]:
    """The observations that are not pictures."""
    named = {k.removeprefix(OBSERVATIONS): field for k, field in schema.fields.items() if k.startswith(OBSERVATIONS)}
    return [name for name, field in named.items() if len(field.shape) == 1 and field.dtype.startswith("float")]


def _learned(columns: Mapping[str, Column], lengths: Sequence[int], names: Sequence[str]) -> dict[str, Array]:
    """What is seen and what is to be imitated, without the last step of each episode: nobody acts there.

    Whoever acted meant `policy_actions`, whatever pushed the hand; but where a person took over, the person is right.
    """
    acting = np.ones(sum(lengths), np.bool_)
    acting[np.cumsum(lengths) - 1] = False
    meant = np.where(columns["interventions"][:, None], columns["actions"], columns["policy_actions"])
    seen = {f"{OBSERVATIONS}{name}": columns[f"{OBSERVATIONS}{name}"][acting] for name in names}
    return {name: column.astype(np.float32) for name, column in {**seen, "actions": meant[acting]}.items()}


def _ahead(lengths: Sequence[int], chunk: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """For every acting step the numbers [N, C] of the steps from there on, and which are of the same episode."""
    acting = np.array(lengths) - 1
    ends = np.repeat(np.cumsum(acting), acting)[:, None]
    ahead = np.arange(acting.sum())[:, None] + np.arange(chunk)
    return np.minimum(ahead, ends - 1), ahead < ends


def _statistics(columns: Mapping[str, Array]) -> dict[str, dict[str, list[float]]]:
    return {
        field: {
            "mean": values.mean(axis=0, dtype=np.float64).tolist(),
            "std": values.std(axis=0, dtype=np.float64).tolist(),
            "min": values.min(axis=0).tolist(),
            "max": values.max(axis=0).tolist(),
        }
        for field, values in columns.items()
    }


def _entry(episode: Episode, part: Part) -> dict[str, Any]:
    return {"part": part, "length": episode.length, **episodes.header(episode)}
