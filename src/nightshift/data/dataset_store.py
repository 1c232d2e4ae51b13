"""The training dataset on disk: two splits of episodes, their statistics, and a manifest of sha256 sums.

data/dataset/  train.safetensors, validation.safetensors   every field, concatenated over episodes
               schema.json       dtype, shape and range of every field
               index.json        every episode: split, length, ending, provenance
               statistics.json   mean, std, min, max of policy inputs and actions over the training split
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
from nightshift.data.episode_store import SCHEMA
from nightshift.data.schema import FieldSpec, Schema
from nightshift.data.tensors import SUFFIX, Column
from nightshift.errors import DataError
from nightshift.types import INSTRUCTION, Array

INDEX = "index.json"
STATISTICS = "statistics.json"
REMEDY = "run `dvc checkout` to restore it, or `nightshift run` to make it again"

DatasetSplit = Literal["train", "validation"]
SPLITS: tuple[DatasetSplit, DatasetSplit] = ("train", "validation")


Rows = tuple[Column, NDArray[np.int64]]
"""A column, and the row of it that belongs to each of N steps."""


@dataclass(frozen=True, kw_only=True)
class CloningSteps:
    """The N steps of a split that have an action, concatenated over episodes, for behaviour cloning."""

    observations: Mapping[str, Rows]
    actions: Array  # [N, C, A] the action chunk that begins at the step
    mask: NDArray[np.bool_]  # [N, C] False where the chunk goes beyond the end of the episode

    def observe(self, index: NDArray[np.int64]) -> dict[str, Column]:
        """The observations of some steps, read from the dataset's files now; vectors are float32."""
        return {name: _policy_dtype(column[rows[index]]) for name, (column, rows) in self.observations.items()}


@dataclass(frozen=True, kw_only=True)
class EpisodeDataset:
    """A verified dataset; its arrays are memory-mapped."""

    schema: Schema
    statistics: Mapping[str, Mapping[str, Any]]
    """By field ("actions", "observations.proprio", ...): mean, std, min, max, each a list."""
    _columns: Mapping[DatasetSplit, Mapping[str, Column]]
    _index: Mapping[DatasetSplit, Sequence[Mapping[str, Any]]]

    @property
    def observations(self) -> list[str]:
        return [name.removeprefix(OBSERVATIONS) for name in self.schema.fields if name.startswith(OBSERVATIONS)]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of everything that a policy can have as an input: vectors, images and the instruction."""
        images = [name for name in self.observations if self._field(name).dtype == "uint8"]
        stored = {name: self._field(name).shape for name in (*_state_observations(self.schema), *images)}
        return {**stored, INSTRUCTION: ()}

    def steps(self, split: DatasetSplit, names: Sequence[str], chunk: int = 1) -> CloningSteps:
        """Training data for a policy with the observations `names` as inputs and chunks of `chunk` actions."""
        lengths = np.array([entry["length"] for entry in self._index[split]], np.int64)
        indices, mask = _chunk_indices(lengths, chunk)
        return CloningSteps(
            observations={name: self._rows(split, name, lengths) for name in names},
            actions=_target_actions(self._columns[split])[_has_action(lengths)][indices],
            mask=mask,
        )

    def _rows(self, split: DatasetSplit, name: str, lengths: NDArray[np.int64]) -> Rows:
        if name == INSTRUCTION:
            instructions = np.array([entry["provenance"]["language"] for entry in self._index[split]])
            return instructions, np.repeat(np.arange(len(lengths)), lengths - 1)
        return self._columns[split][f"{OBSERVATIONS}{name}"], np.flatnonzero(_has_action(lengths))

    def _field(self, name: str) -> FieldSpec:
        return self.schema.fields[f"{OBSERVATIONS}{name}"]

    def episodes(self, split: DatasetSplit) -> Iterator[Episode]:
        """The episodes of a split, as they were written."""
        start = 0
        for entry in self._index[split]:
            end = start + entry["length"]
            yield episodes.assemble({name: c[start:end] for name, c in self._columns[split].items()}, entry)
            start = end


def write(path: Path, splits: Mapping[DatasetSplit, Sequence[Episode]], schema: Schema) -> None:
    """Write the dataset; the caller has checked every episode against `schema`."""
    columns = {split: _concatenate(splits[split], schema) for split in SPLITS}
    has_action = _has_action(np.array([episode.length for episode in splits["train"]]))
    with files.new_folder(path) as new:
        for split in SPLITS:
            tensors.write(new / f"{split}{SUFFIX}", columns[split], "")
        files.write_json(new / SCHEMA, schema.to_json())
        names = [f"{OBSERVATIONS}{name}" for name in _state_observations(schema)]
        known = {name: columns["train"][name].astype(np.float32) for name in names}
        known["actions"] = _target_actions(columns["train"])
        files.write_json(new / STATISTICS, _statistics({name: c[has_action] for name, c in known.items()}))
        files.write_json(new / INDEX, {"episodes": [_entry(e, split) for split in SPLITS for e in splits[split]]})


def read(path: Path) -> EpisodeDataset:
    """Read the dataset after verifying every file against the manifest."""
    files.verify_folder(path, REMEDY)
    return open_verified(path)


def open_verified(path: Path) -> EpisodeDataset:
    """A dataset that `read` has verified already, in this process or another one."""
    try:
        index = json.loads((path / INDEX).read_text())["episodes"]
        return EpisodeDataset(
            schema=Schema.from_json(json.loads((path / SCHEMA).read_text()), str(path / SCHEMA)),
            statistics=json.loads((path / STATISTICS).read_text()),
            _columns={split: tensors.read(path / f"{split}{SUFFIX}")[0] for split in SPLITS},
            _index={split: [entry for entry in index if entry["part"] == split] for split in SPLITS},
        )
    except FileNotFoundError as error:
        raise DataError(
            f"{path} was written by another version: it has no {Path(error.filename).name}", REMEDY
        ) from None


def describe(index: bytes) -> dict[str, Any]:
    """Summarise a dataset version from its index.json: episodes and steps by task and split, sources, versions."""
    entries = json.loads(index)["episodes"]
    tasks = Counter((e["provenance"]["task"], e["part"]) for e in entries)
    steps = Counter[tuple[str, str]]()
    for e in entries:
        steps[e["provenance"]["task"], e["part"]] += e["length"]
    return {
        "episodes": len(entries),
        "steps": sum(steps.values()),
        "rows": [(task, split, count, steps[task, split]) for (task, split), count in sorted(tasks.items())],
        "sources": sorted({e["provenance"]["source"] for e in entries}),
        "suites": sorted({e["provenance"]["suite"] for e in entries}),
        "commits": sorted({e["provenance"]["commit"] for e in entries}),
        "versions": sorted({f"{k} {v}" for e in entries for k, v in e["provenance"]["versions"].items()}),
    }


def _concatenate(split: Sequence[Episode], schema: Schema) -> dict[str, Column]:
    columns = [episodes.columns(episode) for episode in split]
    nothing = {name: np.empty((0, *field.shape), field.dtype) for name, field in schema.fields.items()}
    return {name: np.concatenate([none, *(column[name] for column in columns)]) for name, none in nothing.items()}


def _state_observations(schema: Schema) -> list[str]:
    """Observations that are float vectors, not images."""
    named = {k.removeprefix(OBSERVATIONS): field for k, field in schema.fields.items() if k.startswith(OBSERVATIONS)}
    return [name for name, field in named.items() if len(field.shape) == 1 and field.dtype.startswith("float")]


def _has_action(lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of all steps have an action: not the last of an episode."""
    has_action = np.ones(lengths.sum(), np.bool_)
    has_action[np.cumsum(lengths) - 1] = False
    return has_action


def _target_actions(columns: Mapping[str, Column]) -> Array:
    """The chosen action (`policy_actions`), not the disturbed one that was executed; during interventions the executed
    action, which is the person's."""
    chosen = np.where(columns["interventions"][:, None], columns["actions"], columns["policy_actions"])
    return chosen.astype(np.float32)


def _policy_dtype(values: Column) -> Column:
    return values.astype(np.float32) if values.dtype.kind == "f" else values


def _chunk_indices(lengths: NDArray[np.int64], chunk: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The step numbers [N, C] of the chunk that begins at each step, and which of them are in the same episode."""
    counts = lengths - 1
    ends = np.repeat(np.cumsum(counts), counts)[:, None]
    indices = np.arange(counts.sum())[:, None] + np.arange(chunk)
    return np.minimum(indices, ends - 1), indices < ends


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


def _entry(episode: Episode, split: DatasetSplit) -> dict[str, Any]:
    return {"part": split, "length": episode.length, **episodes.header(episode)}
