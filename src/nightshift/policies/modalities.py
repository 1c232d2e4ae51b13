"""The observations that a policy reads, by modality: camera images, state vectors and the instruction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nightshift.errors import DataError
from nightshift.policies import instruction, readable
from nightshift.policies.base import Shapes
from nightshift.policies.readable import select
from nightshift.types import INSTRUCTION, Observation

__all__ = ["Modalities", "observed", "select"]  # families of other packages find `select` here, too


class Modalities:
    """The shapes of a policy's observations, and how each becomes a tensor."""

    def __init__(self, shapes: Shapes, max_words: int) -> None:
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.max_words = max_words
        self.cameras, self.vectors = readable.kinds(self.shapes)
        self.instruction = INSTRUCTION in self.shapes

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


def observed(observations: Mapping[str, Any], name: str) -> Any:
    """The observation of that name; DataError if there is none."""
    if name not in observations:
        raise DataError(
            f"the policy reads {name}, and the observations are {', '.join(observations)}",
            "add a camera to env.cameras.names in params.yaml, or use a policy that does not read it",
        )
    return observations[name]
