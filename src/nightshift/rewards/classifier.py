"""The success classifier: a small network on camera images, its threshold, and its folder.

models/classifier/  classifier.safetensors   weights
                    classifier.json          architecture, inputs, threshold, and how it was calibrated
                    starts.json              the starts of episodes by part, so that none is evaluated that it has seen
                    manifest.json            sha256 of each file, written last; the classifier's name is its digest
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from nightshift import files
from nightshift.errors import ConfigError, DataError
from nightshift.policies.base import Inputs, Shapes, to_device
from nightshift.policies.cnn import CnnEncoder
from nightshift.policies.modalities import Modalities
from nightshift.types import INSTRUCTION, Array, Observation

if TYPE_CHECKING:
    from nightshift import config

WEIGHTS = "classifier.safetensors"
SPEC = "classifier.json"
STARTS = "starts.json"
REMEDY = "train it again with `nightshift classifier train`, or restore it with `dvc checkout models/classifier.dvc`"
_NAME_DIGITS = 12
_ARCHITECTURE = "cnn"
_BATCH = 256
"""Frames that are judged at once."""


class SuccessClassifier(nn.Module):
    """Whether camera images show that the task is done: an encoder per camera, conditioned on the instruction."""

    def __init__(self, *, inputs: Shapes, channels: Sequence[int], hidden: int, dropout: float, max_words: int) -> None:
        super().__init__()
        self.modalities = Modalities(inputs, max_words)
        self.encoder = CnnEncoder(self.modalities, channels, hidden)
        layers = [nn.Linear(self.encoder.size, hidden), nn.Dropout(dropout), nn.LayerNorm(hidden), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Linear(hidden, 1))
        self._sizes = {"channels": list(channels), "hidden": hidden, "dropout": dropout, "max_words": max_words}

    @classmethod
    def from_config(cls, settings: config.Classifier, shapes: Shapes) -> SuccessClassifier:
        """An untrained one; `shapes` has every observation of the episodes."""
        return cls(
            inputs=_select(settings.inputs, shapes),
            channels=settings.channels,
            hidden=settings.hidden,
            dropout=settings.dropout,
            max_words=settings.max_words,
        )

    @property
    def spec(self) -> dict[str, Any]:
        return {**self._sizes, "inputs": {name: list(shape) for name, shape in self.modalities.shapes.items()}}

    @property
    def cameras(self) -> list[str]:
        return list(self.modalities.cameras)

    def forward(self, inputs: Inputs) -> Tensor:
        """Logits of success [B]."""
        logits: Tensor = self.net(self.encoder(inputs))[:, 0]
        return logits

    @torch.inference_mode()
    def probabilities(self, observations: Observation) -> Array:
        """Of success, for observations [N, …]."""
        self.eval()
        inputs = self.modalities.tensors(observations)
        count = len(next(iter(inputs.values())))
        device = next(self.parameters()).device
        parts = [
            torch.sigmoid(
                self(to_device({name: values[start : start + _BATCH] for name, values in inputs.items()}, device))
            )
            for start in range(0, count, _BATCH)
        ]
        found: Array = torch.cat(parts).cpu().numpy()
        return found

    def check(self, shapes: Shapes, where: str) -> None:
        """DataError where the observations are not those that the classifier was trained on."""
        for name, expected in self.modalities.shapes.items():
            if name == INSTRUCTION:
                continue
            if name not in shapes:
                has = ", ".join(camera for camera, shape in shapes.items() if len(shape) == len(expected)) or "none"
                raise DataError(
                    f"the success classifier sees the camera {name}, and the cameras of {where} are: {has}",
                    f"add {name} to env.cameras.names in params.yaml, or train a classifier on other cameras",
                )
            if tuple(shapes[name]) != expected:
                raise DataError(
                    f"{name} of {where} has shape {list(shapes[name])}, and the success classifier was trained on "
                    f"{list(expected)}",
                    "set env.cameras.size in params.yaml to the classifier's size, or train one for this size",
                )


def _select(names: Sequence[str], shapes: Shapes) -> dict[str, tuple[int, ...]]:
    missing = [name for name in names if name not in shapes]
    if missing:
        images = [name for name, shape in shapes.items() if len(shape) > 1]
        raise ConfigError(
            f"classifier.inputs has {', '.join(missing)}, and the cameras of the episodes are: "
            f"{', '.join(images) or 'none'}",
            "add the camera to env.cameras.names in params.yaml and run again, or edit classifier.inputs",
        )
    vectors = [name for name in names if len(shapes[name]) == 1]
    if vectors or list(names) == [INSTRUCTION]:
        raise ConfigError(
            f"classifier.inputs is {', '.join(names)}, and the success classifier sees cameras and the {INSTRUCTION}",
            "name cameras of env.cameras.names in classifier.inputs in params.yaml",
        )
    return {name: tuple(shapes[name]) for name in names}


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A classifier that can give rewards."""

    network: SuccessClassifier
    threshold: float
    """Success is a probability of at least this."""
    ambiguous_steps: int
    """Control steps before success that it was not judged on."""
    tasks: Sequence[str]
    calibration: Mapping[str, Any]
    """How it did on the episodes that chose the threshold."""
    starts: Mapping[str, str]
    """The part of every start of an episode that it was made with."""

    def check_tasks(self, tasks: Sequence[str]) -> None:
        unknown = [task for task in tasks if task not in self.tasks]
        if unknown:
            raise DataError(
                f"the success classifier was trained on {', '.join(self.tasks)}, and not on {', '.join(unknown)}",
                "record episodes of these tasks and train it again: nightshift classifier record, then train",
            )


def save(trained: Trained, folder: Path) -> None:
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in trained.network.state_dict().items()}
    with files.new_folder(folder) as new:
        (new / WEIGHTS).write_bytes(to_bytes(weights))
        spec = {"architecture": _ARCHITECTURE, **trained.network.spec}
        facts = {
            "threshold": trained.threshold,
            "ambiguous_steps": trained.ambiguous_steps,
            "tasks": list(trained.tasks),
            "calibration": dict(trained.calibration),
        }
        files.write_json(new / SPEC, {"network": spec, **facts})
        files.write_json(new / STARTS, dict(trained.starts))


def name_of(folder: Path) -> str:
    """Of the classifier in a folder, by its content: `rlpd.reward` names it, so that it is in the key of the stage."""
    if not (folder / files.MANIFEST).exists():
        raise DataError(f"there is no success classifier in {folder}", REMEDY)
    return f"classifier-{files.sha256(folder / files.MANIFEST)[:_NAME_DIGITS]}"


def load(folder: Path) -> Trained:
    """The classifier in a folder, after all files were verified."""
    name_of(folder)
    files.verify_folder(folder, REMEDY)
    try:
        content = json.loads((folder / SPEC).read_text())
        spec = dict(content["network"])
        architecture = spec.pop("architecture")
        if architecture != _ARCHITECTURE:
            raise DataError(f"{folder / SPEC} has the architecture {architecture!r}, not {_ARCHITECTURE!r}", REMEDY)
        network = SuccessClassifier(**spec)
        network.load_state_dict(from_bytes((folder / WEIGHTS).read_bytes()))
        return Trained(
            network=network.eval(),
            threshold=float(content["threshold"]),
            ambiguous_steps=int(content["ambiguous_steps"]),
            tasks=content["tasks"],
            calibration=content["calibration"],
            starts=json.loads((folder / STARTS).read_text()),
        )
    except (RuntimeError, SafetensorError):
        raise DataError(f"{folder / WEIGHTS} has not the weights of the network in {SPEC} beside it", REMEDY) from None
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise DataError(f"{folder} is not a success classifier of this version: {error!r}", REMEDY) from None
