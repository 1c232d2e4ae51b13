"""The observations that a policy reads, by modality: camera images, state vectors and the instruction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nightshift.errors import ConfigError, DataError
from nightshift.policies import instruction
from nightshift.policies.base import Shapes
from nightshift.types import INSTRUCTION, Observation

_CHANNELS = 3


class Modalities:
    """The shapes of a policy's observations, and how each becomes a tensor."""

    def __init__(self, shapes: Shapes, max_words: int) -> None:
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.max_words = max_words
        self.cameras: dict[str, tuple[int, int]] = {}
        self.vectors: dict[str, int] = {}
        self.instruction = INSTRUCTION in self.shapes
        for name, shape in self.shapes.items():
            match shape:
                case () if name == INSTRUCTION:
                    pass
                case (size,):
                    self.vectors[name] = size
                case (height, width, channels) if channels == _CHANNELS:
                    self.cameras[name] = (height, width)
                case _:
                    raise ConfigError(
                        f"{name}, an observation of shape {list(shape)}, is neither a camera image [height, width, 3], "
                        f"nor a vector, nor the {INSTRUCTION}",
                        "take it out of policy.inputs in params.yaml",
                    )

    def tensors(self, observations: Observation) -> dict[str, Tensor]:
        """Images uint8 [B, H, W, 3], vectors float32 [B, D], the instruction's words int32 [B, L], on the CPU."""
        return {name: self.tensor(observations, name) for name in self.shapes}

    def tensor(self, observations: Observation, name: str) -> Tensor:
        """One of them."""
        values = observed(observations, name)
        if name == INSTRUCTION:
            return instruction.encode(values, self.max_words)
        if values.shape[1:] != self.shapes[name]:
            raise DataError(
                f"{name} has shape {list(values.shape[1:])}, and the policy was made for {list(self.shapes[name])}",
                "set env.cameras.size to the policy's size, or train a policy for this one",
            )
        kind = np.uint8 if name in self.cameras else np.float32
        # torch shares the memory, and takes neither negative strides (rotated images) nor read-only arrays (Ray's).
        return torch.from_numpy(np.require(values, kind, ["C", "W"]))


def select(names: Sequence[str], shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """The shapes of a policy's inputs among those of all observations."""
    unknown = [name for name in names if name not in shapes]
    if unknown:
        raise ConfigError(
            f"policy.inputs has {', '.join(unknown)}, and the observations are {', '.join(shapes)}",
            "edit policy.inputs, or add a camera to env.cameras.names, in params.yaml",
        )
    return {name: shapes[name] for name in names}


def observed(observations: Mapping[str, Any], name: str) -> Any:
    """The observation of that name; DataError if there is none."""
    if name not in observations:
        raise DataError(
            f"the policy reads {name}, and the observations are {', '.join(observations)}",
            "add a camera to env.cameras.names in params.yaml, or use a policy that does not read it",
        )
    return observations[name]
