"""Checkpoints of a training stage: written atomically, and the newest whole one is resumed from.

<state>/step-00000012/           tensors.safetensors   weights, optimizer moments, RNG states
                                 shards/               those of a sharded learner, a file per rank (shards.py)
                                 state.json            step, cursors, history: everything that is not a tensor
                                 manifest.json         sha256 of all of them, written last
<state>/damaged-step-00000013/   a checkpoint that was damaged after it was written, kept for inspection
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor

from nightshift import files
from nightshift.errors import DataError, ProjectError

TENSORS = "tensors.safetensors"
STATE = "state.json"
SHARDS = "shards"
KEPT = 2
_DAMAGED = "damaged-"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    step: int
    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]
    shards: Path | None = None
    """The folder of further tensors that sharded ranks wrote."""


WriteShards = Callable[[Path], Mapping[str, str]]
"""Writes files into a folder; their names and sha256 sums, or nothing."""


def save(folder: Path, checkpoint: Checkpoint, write_shards: WriteShards = lambda folder: {}) -> None:
    """Write the checkpoint, then remove all but the newest few."""
    known: dict[str, str] = {}
    with files.new_folder(folder / f"step-{checkpoint.step:08d}", known) as new:
        known |= {f"{SHARDS}/{name}": digest for name, digest in write_shards(new / SHARDS).items()}
        _require_here(new, known)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()}
        (new / TENSORS).write_bytes(to_bytes(tensors))
        files.write_json(new / STATE, {"step": checkpoint.step, "state": checkpoint.state})
    for old in _steps(folder)[KEPT:]:
        shutil.rmtree(old)


def _require_here(new: Path, written: Iterable[str]) -> None:
    missing = sorted(name for name in written if not (new / name).exists())
    if missing:
        raise ProjectError(
            f"learner ranks wrote {', '.join(missing)} of a checkpoint, and this machine does not see them in {new}",
            "give all nodes the project's folder under the same path (NFS, for example)",
        )


def newest(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint, or None to start from the beginning.

    Writing is atomic, so a checkpoint that is not whole was damaged later. It is set aside with a warning: training is
    deterministic, so resuming from the one before it ends with the same weights.
    """
    files.sweep_temporaries(folder)
    damaged: list[tuple[Path, str]] = []
    found = None
    for path in _steps(folder):
        try:
            found = _load(path)
            break
        except DataError as error:
            damaged.append((path, error.what))
        except OSError as error:  # a bad sector
            damaged.append((path, f"{path} cannot be read: {error}"))
    for path, what in reversed(damaged):
        goes_on = "training starts from the beginning" if found is None else f"training goes on from step {found.step}"
        _log.warning("%s; %s, and the checkpoint is kept as %s", what, goes_on, _set_aside(path).name)
    return found


def size_on_disk(folder: Path) -> int:
    """Bytes of the checkpoints that are there; 0 if a run removes one of them meanwhile."""
    try:
        return sum(file.stat().st_size for step in _steps(folder) for file in step.rglob("*") if file.is_file())
    except FileNotFoundError:
        return 0


def _load(path: Path) -> Checkpoint:
    sums = files.verify_folder(path, remedy="")  # `newest` goes on without it
    content = json.loads((path / STATE).read_text())
    return Checkpoint(
        step=content["step"],
        tensors=load_file(path / TENSORS),
        state=content["state"],
        shards=path / SHARDS if any(name.startswith(f"{SHARDS}/") for name in sums) else None,
    )


def _set_aside(path: Path) -> Path:
    """Take a damaged checkpoint out of the way; only the last one set aside is kept."""
    for old in path.parent.glob(f"{_DAMAGED}*"):
        shutil.rmtree(old)
    aside = path.rename(path.with_name(f"{_DAMAGED}{path.name}"))
    files.sync(path.parent)
    return aside


def _steps(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"), reverse=True)
