"""Reads trajectories that RLinf wrote: `.pt` with weights_only, `.pkl` through the restricted unpickler.

They do not record episodes. A row continues the episode of the previous row of its environment only if that row did not
end an episode, no rollout epoch begins, and the row's curr_obs equals the previous next_obs byte for byte.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from nightshift.data import symlinks, unpickling
from nightshift.data.formats import reading
from nightshift.data.replay.index import TrajectoryEntry
from nightshift.data.replay.trajectory import FLAGS, RowIndices, TrajectoryBatch
from nightshift.data.replay.validation import check
from nightshift.data.tensors import Column
from nightshift.errors import DataError

SUFFIXES = (".pt", ".pkl")
_PLAIN = ("actions", "rewards", "intervene_flags", "versions", "prev_logprobs", "prev_values")
_NESTED = ("forward_inputs", "curr_obs", "next_obs")


def read(path: Path, entry: TrajectoryEntry) -> TrajectoryBatch:
    with reading(str(path)):
        content = _load(symlinks.check(path, path.parent))
    try:
        with reading("it"):
            trajectory = from_rollout(content, entry.max_episode_length, entry.model_weights_id)
            check(trajectory)
    except DataError as error:
        raise DataError(f"{path} is not a trajectory that can be read: {error.what}", error.next_step) from None
    if trajectory.num_samples != entry.num_samples:
        raise DataError(f"{path} has {trajectory.num_samples} samples and the index says {entry.num_samples}")
    return trajectory


def from_rollout(content: Mapping[str, Any], max_episode_length: int, model_weights_id: str) -> TrajectoryBatch:
    """Convert RLinf's fields, tensors [T, B, …]; fields without a value per step are left out, as in RLinf."""
    arrays = {name: _array(content[name]) for name in (*_PLAIN, *FLAGS) if content.get(name) is not None}
    nested = {name: _arrays(content.get(name) or {}) for name in _NESTED}
    if "rewards" not in arrays or "actions" not in arrays:
        raise DataError("rewards or actions are missing")
    length = len(arrays["rewards"])
    epochs = max([1, *(len(arrays[name]) - length for name in FLAGS if name in arrays)])
    arrays |= {name: _without_first(arrays[name], length).astype(np.bool_) for name in FLAGS if name in arrays}
    if "terminations" not in arrays and "dones" not in arrays:
        raise DataError("terminations and dones are both missing")
    arrays.setdefault("terminations", arrays.get("dones", np.zeros(0)))
    arrays.setdefault("truncations", np.zeros_like(arrays["terminations"]))
    begins = _begins(arrays, nested["curr_obs"], nested["next_obs"], length // epochs)
    episode, t = _identity(begins)
    columns = arrays | {
        "forward_inputs": nested["forward_inputs"],
        "max_episode_length": max_episode_length,
        "model_weights_id": model_weights_id,
    }
    return TrajectoryBatch.from_observations(nested["curr_obs"], nested["next_obs"], episode, t, columns)


def _load(path: Path) -> Mapping[str, Any]:
    if path.suffix == ".pt":
        _check_archive(path)
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except unpickling.UNPICKLING_ERRORS as error:
            raise DataError(f"{path} is refused: {str(error).splitlines()[0]}") from None
    else:
        content = unpickling.load(path, _ALLOWED)
    content = vars(content) if isinstance(content, SimpleNamespace) else content
    if not isinstance(content, Mapping):
        raise DataError(f"{path} does not hold a trajectory but a {type(content).__name__}")
    return content


def _check_archive(path: Path) -> None:
    """Check a file of torch.save before torch reads it: it is a zip whose entries are not compressed, and one is a
    pickle."""
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > path.stat().st_size:
                    raise DataError(
                        f"{path} is refused: {entry.filename} in it is compressed", "save it with torch.save"
                    )
                if entry.filename.endswith(".pkl"):
                    unpickling.check_work(io.BytesIO(archive.read(entry)), entry.file_size, str(path))
    except zipfile.BadZipFile as error:
        raise DataError(f"{path} is refused: torch.save did not write it: {error}", "save it again") from None


def _storage(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _tensor(storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> torch.Tensor:
    """Rebuild a tensor as torch does, after checking that its storage is large enough."""
    flat = torch.empty(0, dtype=storage.dtype).set_(storage._untyped_storage)
    reach = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if all(size) else 0
    if min((offset, *size, *stride)) < 0 or reach >= max(1, len(flat)):
        raise ValueError("a tensor reaches beyond its storage")
    return flat.as_strided(size, stride, offset)


_ALLOWED: unpickling.AllowedGlobals = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch.storage._load_from_bytes": _storage,
    "rlinf.data.embodied_io_struct.Trajectory": unpickling.RECORD,
}


def _array(value: Any) -> Column:
    if isinstance(value, torch.Tensor):
        if value.nbytes > value.untyped_storage().nbytes():
            raise DataError(f"a tensor of shape {list(value.shape)} has a smaller storage")
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    if not isinstance(value, np.ndarray) or value.ndim < 2:  # noqa: PLR2004
        raise DataError("a field is not a tensor [T, B, …]")
    return value


def _arrays(values: Mapping[str, Any]) -> dict[str, Column]:
    return {
        name: _array(value)
        for name, value in values.items()
        if isinstance(value, torch.Tensor | np.ndarray) and value.ndim >= 2  # noqa: PLR2004
    }


def _without_first(flags: Column, length: int) -> Column:
    """Flags with T + k rows come from k epochs, each with an extra row for the state before its first step."""
    epochs = len(flags) - length
    if epochs <= 0:
        return flags
    if length % epochs:
        raise DataError(f"flags have {len(flags)} rows for {length} steps, which do not divide into {epochs} epochs")
    kept = flags.reshape(epochs, length // epochs + 1, *flags.shape[1:])[:, 1:]
    return kept.reshape(length, *flags.shape[1:])


def _begins(
    arrays: Mapping[str, Column], curr_obs: Mapping[str, Column], next_obs: Mapping[str, Column], epoch: int
) -> Column:
    """[T, B]: whether an episode begins at the row."""
    length, envs = arrays["rewards"].shape[:2]
    begins: Column = np.zeros((length, envs), np.bool_)
    begins[::epoch] = True
    for name in ("terminations", "truncations", "dones"):
        if name in arrays:
            begins[1:] |= np.asarray(arrays[name].reshape(length, envs, -1).any(axis=2))[:-1]
    for name in set(curr_obs) & set(next_obs):
        saw, led_to = (np.ascontiguousarray(a).reshape(length, envs, -1) for a in (curr_obs[name], next_obs[name]))
        begins[1:] |= (saw.view(np.uint8)[1:] != led_to.view(np.uint8)[:-1]).any(axis=2)
    return begins


def _identity(begins: Column) -> tuple[RowIndices, RowIndices]:
    count = np.cumsum(begins, axis=0)
    episode = (count - 1) + np.concatenate([[0], np.cumsum(count[-1])[:-1]])
    steps = np.arange(len(begins))[:, None]
    return episode, steps - np.maximum.accumulate(np.where(begins, steps, 0), axis=0)
