"""The schema of a set of episodes. Violations are reported with field, episode and step; nothing is cast."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from nightshift.data.episode import Episode, assemble, columns, header
from nightshift.data.tensors import DTYPES, Column
from nightshift.errors import DataError
from nightshift.types import Split

Range = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class FieldSpec:
    """The dtype, shape and range of one field at one step."""

    dtype: str
    shape: tuple[int, ...]
    range: Range | None = None  # both ends included


_FIXED = {
    "interventions": FieldSpec(dtype="bool", shape=()),
    "policy_versions": FieldSpec(dtype="int64", shape=()),
}
_UNIT = (0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The fields of an episode by name: "actions", "observations.proprio", "extras.force", ..."""

    fields: Mapping[str, FieldSpec]

    @classmethod
    def of(cls, episode: Episode, ranges: Mapping[str, Range] | None = None) -> Schema:
        """The schema of this episode, with `ranges` for some of its fields."""
        limits = {"discounts": _UNIT, **(ranges or {})}
        declared = {
            name: FieldSpec(dtype=column.dtype.name, shape=column.shape[1:], range=limits.get(name))
            for name, column in columns(episode).items()
        }
        scalars = {name: replace(declared[name], shape=()) for name in ("rewards", "discounts")}
        return cls(fields={**declared, **scalars, **_FIXED})

    def conformed(self, episode: Episode) -> Episode:
        """The episode with the fields of this schema alone, which it has, and vectors and numbers in their dtypes."""
        kept = {name: columns(episode)[name] for name in self.fields}
        cast = {
            name: column.astype(self.fields[name].dtype, copy=False) if _may_be_widened(self.fields[name]) else column
            for name, column in kept.items()
        }
        return assemble(cast, header(episode))

    def check(self, episode: Episode, where: str) -> None:
        """Raise DataError if an episode violates the schema; `where` is its file or sender, for the message."""
        _check_ending(episode, where)
        _check_provenance(episode, where)
        _check_metadata(episode, where)
        found = columns(episode)
        if missing := sorted(set(self.fields) - set(found)):
            raise _violation(episode, where, ", ".join(missing), "is missing")
        if extra := sorted(set(found) - set(self.fields)):
            raise _violation(episode, where, ", ".join(extra), f"is not declared; {', '.join(sorted(self.fields))} are")
        for name, field in self.fields.items():
            _check_column(episode, where, name, found[name], field)

    def to_json(self) -> dict[str, Any]:
        return {name: asdict(field) for name, field in self.fields.items()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], where: str) -> Schema:
        try:
            return cls(fields={name: _field(entry) for name, entry in value.items()})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{where} is not a schema of episodes: {error!r}") from None


def common(schemas: Sequence[Schema]) -> Schema:
    """The fields that all of them have. Vectors and numbers of different dtypes get one that holds each of them."""
    first, *others = schemas
    shared = {name: field for name, field in first.fields.items() if all(name in other.fields for other in others)}
    return Schema(
        fields={name: _widened(field, [other.fields[name] for other in others]) for name, field in shared.items()}
    )


def _may_be_widened(field: FieldSpec) -> bool:
    """Images may not: bytes and shares of one are not the same light."""
    return len(field.shape) <= 1


def _widened(field: FieldSpec, others: Sequence[FieldSpec]) -> FieldSpec:
    if not _may_be_widened(field):
        return field
    return replace(field, dtype=np.result_type(field.dtype, *(other.dtype for other in others)).name)


def _field(entry: Mapping[str, Any]) -> FieldSpec:
    low_high = entry["range"]
    return FieldSpec(
        dtype=str(np.dtype(entry["dtype"])),
        shape=tuple(map(int, entry["shape"])),
        range=None if low_high is None else (float(low_high[0]), float(low_high[1])),
    )


def _check_ending(episode: Episode, where: str) -> None:
    for name in ("terminated", "truncated", "success"):
        if type(getattr(episode, name)) is not bool:
            raise _violation(episode, where, name, f"is {getattr(episode, name)!r}, not true or false")
    if episode.actions.ndim == 0 or episode.length == 0:
        raise _violation(episode, where, "actions", "has no steps")
    if not (episode.terminated or episode.truncated):
        raise _violation(episode, where, "terminated", "and truncated are both false: the episode has no end")
    if episode.policy_actions.shape != episode.actions.shape:
        shapes = f"{list(episode.policy_actions.shape)}; actions has {list(episode.actions.shape)}"
        raise _violation(episode, where, "policy_actions", f"has shape {shapes}")


_TEXTS = ("source", "suite", "task", "language", "commit", "origin")


def _check_provenance(episode: Episode, where: str) -> None:
    origin = episode.provenance
    for name in _TEXTS:
        if not isinstance(getattr(origin, name), str):
            raise _violation(episode, where, f"provenance.{name}", f"is {getattr(origin, name)!r}, not text")
    if origin.split not in get_args(Split):
        *others, last = get_args(Split)
        raise _violation(episode, where, "provenance.split", f"is {origin.split!r}, not {', '.join(others)} or {last}")
    for name in ("init_state", "seed"):
        if type(getattr(origin, name)) not in (int, type(None)):
            raise _violation(episode, where, f"provenance.{name}", f"is {getattr(origin, name)!r}, not a whole number")
    if not isinstance(origin.versions, Mapping) or not all(
        isinstance(part, str) for item in origin.versions.items() for part in item
    ):
        raise _violation(episode, where, "provenance.versions", f"is {origin.versions!r}, not a dict of strings")
    if type(origin.disturbance) not in (int, float) or not math.isfinite(origin.disturbance):
        raise _violation(episode, where, "provenance.disturbance", f"is {origin.disturbance!r}, not a number")


def _check_metadata(episode: Episode, where: str) -> None:
    """Metadata must survive a round trip through JSON."""
    metadata = episode.metadata
    if not isinstance(metadata, Mapping):
        raise _violation(episode, where, "metadata", f"is {metadata!r}, not a dict")
    for name, value in metadata.items():
        try:
            same = isinstance(name, str) and json.loads(json.dumps(value)) == value
        except (TypeError, ValueError, RecursionError):
            same = False
        if not same:
            raise _violation(
                episode, where, f"metadata.{name}", f"is {value!r:.80}, which JSON cannot represent exactly"
            )


def _check_column(episode: Episode, where: str, name: str, column: Column, field: FieldSpec) -> None:
    if column.dtype.name != field.dtype or field.dtype not in DTYPES or not column.dtype.isnative:
        raise _violation(episode, where, name, f"is {column.dtype}, not {field.dtype}")
    expected = (episode.length, *field.shape)
    if column.shape != expected:
        raise _violation(episode, where, name, f"has shape {list(column.shape)}, not {list(expected)}")
    flat = column.reshape(episode.length, -1)
    if np.issubdtype(column.dtype, np.floating):
        _refuse(episode, where, name, "is not finite", ~np.isfinite(flat))
    if field.range is not None and flat.shape[1]:
        low, high = field.range
        _refuse(episode, where, name, f"lies outside [{low:g}, {high:g}]", (flat < low) | (flat > high))


def _refuse(episode: Episode, where: str, name: str, what: str, wrong: NDArray[np.bool_]) -> None:
    """`wrong` is [N, …]; the error names the first step with a True."""
    if wrong.any():
        raise _violation(episode, where, name, what, step=int(np.argmax(wrong.any(axis=1))))


def _violation(episode: Episode, where: str, field: str, what: str, step: int | None = None) -> DataError:
    at = "" if step is None else f", step {step}"
    return DataError(
        f"{where}: {field} {what} (episode: {episode.label}{at})", "fix the episode at its source, or leave it out"
    )
