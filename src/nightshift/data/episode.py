"""One demonstration on disk: a safetensors file whose header carries the provenance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_bytes

from nightshift import files
from nightshift.errors import DataError
from nightshift.types import ACTION_DIM, Array, Provenance, Trajectory

SUFFIX = ".safetensors"
REMEDY = "run `nightshift run`: the collect stage makes the demos again"


@dataclass(frozen=True, kw_only=True)
class Episode:
    """T steps: what was seen, what was done, and whether it worked."""

    observations: Mapping[str, Array]  # each [T, D]
    actions: Array  # [T, A] in [-1, 1]
    success: bool
    provenance: Provenance

    @property
    def length(self) -> int:
        return len(self.actions)


def from_trajectory(trajectory: Trajectory, provenance: Provenance) -> Episode:
    return Episode(
        observations=trajectory.observations,
        actions=trajectory.actions,
        success=trajectory.success,
        provenance=provenance,
    )


def save(episode: Episode, path: Path) -> None:
    arrays = {f"observations.{name}": np.ascontiguousarray(a) for name, a in episode.observations.items()}
    # One entry, since safetensors writes several in any order: the same episode must give the same bytes.
    header = {"episode": json.dumps({"success": episode.success, "provenance": asdict(episode.provenance)})}
    files.write_bytes(path, to_bytes({**arrays, "actions": np.ascontiguousarray(episode.actions)}, metadata=header))


def load(path: Path) -> Episode:
    try:
        with safe_open(path, framework="numpy") as content:
            header = json.loads(content.metadata()["episode"])
            arrays = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
        return Episode(
            observations={k.removeprefix("observations."): v for k, v in arrays.items() if k != "actions"},
            actions=arrays["actions"],
            success=header["success"],
            provenance=Provenance(**header["provenance"]),
        )
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is not a readable episode: {error}", REMEDY) from None


def validate(episode: Episode, path: Path, sizes: Mapping[str, int]) -> None:
    """Refuse an episode that breaks the schema; `sizes` are the observations every episode must have."""
    if set(episode.observations) != set(sizes):
        found, wanted = ", ".join(sorted(episode.observations)), ", ".join(sorted(sizes))
        raise _broken(path, "observations", episode, f"has {found}; the other episodes have {wanted}")
    for name, size in sizes.items():
        _check(episode, path, f"observations.{name}", episode.observations[name], size)
    _check(episode, path, "actions", episode.actions, ACTION_DIM)
    outside = np.flatnonzero((np.abs(episode.actions) > 1).any(axis=1))
    if len(outside):
        raise _broken(path, "actions", episode, "lies outside [-1, 1]", int(outside[0]))
    if not episode.success:
        raise _broken(path, "success", episode, "is false: only successful episodes are demos")
    if episode.provenance.split != "train":
        raise _broken(
            path,
            "provenance.split",
            episode,
            f"is {episode.provenance.split!r}: evaluation states are not for training",
        )


def _check(episode: Episode, path: Path, field: str, array: Array, size: int) -> None:
    if array.dtype != np.float32:
        raise _broken(path, field, episode, f"is {array.dtype}, not float32")
    if array.shape != (episode.length, size):
        raise _broken(path, field, episode, f"has shape {list(array.shape)}, not [{episode.length}, {size}]")
    if episode.length == 0:
        raise _broken(path, field, episode, "has no steps")
    broken = np.flatnonzero(~np.isfinite(array).all(axis=1))
    if len(broken):
        raise _broken(path, field, episode, "is not finite", int(broken[0]))


def _broken(path: Path, field: str, episode: Episode, what: str, step: int | None = None) -> DataError:
    origin = f"{episode.provenance.task}, init state {episode.provenance.init_state}"
    at = "" if step is None else f", step {step}"
    return DataError(f"{path}: {field} {what} (episode: {origin}{at})", REMEDY)
