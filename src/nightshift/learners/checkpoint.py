"""Checkpoints of a training stage: atomic to write, newest complete one wins, damaged ones are named.

<state>/step-00000012/   tensors.safetensors   weights, optimizer moments, RNG states
                         state.json            step, cursors, history: everything that is not a tensor
                         manifest.json         sha256 of both, written last
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor

from nightshift import files
from nightshift.errors import CheckpointError, DataError

TENSORS = "tensors.safetensors"
STATE = "state.json"
KEPT = 2


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    step: int
    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the checkpoint, then let go of all but the newest few."""
    with files.new_folder(folder / f"step-{checkpoint.step:08d}") as new:
        tensors = {name: tensor.detach().contiguous() for name, tensor in checkpoint.tensors.items()}
        (new / TENSORS).write_bytes(to_bytes(tensors))
        files.write_json(new / STATE, {"step": checkpoint.step, "state": checkpoint.state})
    for old in _steps(folder)[KEPT:]:
        shutil.rmtree(old)


def newest(folder: Path) -> Checkpoint | None:
    """The newest complete checkpoint, or None. Writing is atomic, so one that is there and broken was damaged later."""
    files.sweep_temporaries(folder)
    for path in _steps(folder):
        remedy = f"rm -r {path} and run again: training goes on from the checkpoint before it"
        try:
            files.verify_folder(path, remedy)
        except DataError as error:
            raise CheckpointError(error.what, error.next_step) from None
        content = json.loads((path / STATE).read_text())
        return Checkpoint(step=content["step"], tensors=load_file(path / TENSORS), state=content["state"])
    return None


Trained = Mapping[str, tuple[torch.nn.Module, torch.optim.Optimizer]]
"""What a checkpoint holds, by name: a network and the optimizer that trains it."""


def pack(trained: Trained, generator: torch.Generator) -> dict[str, Tensor]:
    """Weights, optimizer moments and RNG state as one flat set of tensors."""
    tensors = {"generator": generator.get_state()}
    for name, (module, optimizer) in trained.items():
        tensors |= {f"{name}.weights.{key}": value for key, value in module.state_dict().items()}
        for index, values in optimizer.state_dict()["state"].items():
            tensors |= {f"{name}.optimizer.{index}.{key}": torch.as_tensor(value) for key, value in values.items()}
    return tensors


def unpack(tensors: Mapping[str, Tensor], trained: Trained, generator: torch.Generator) -> None:
    """Put back what `pack` took; learning rates and the like come from params.yaml, not from the checkpoint."""
    generator.set_state(tensors["generator"])
    for name, (module, optimizer) in trained.items():
        module.load_state_dict(_under(tensors, f"{name}.weights."))
        moments: dict[int, dict[str, Tensor]] = {}
        for key, value in _under(tensors, f"{name}.optimizer.").items():
            index, _, moment = key.partition(".")
            moments.setdefault(int(index), {})[moment] = value
        optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def _steps(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"), reverse=True)
