"""A policy family of its own: residual blocks on state vectors, with one of Nightshift's heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from nightshift.config import Count, GaussianHead, PolicySettings
from nightshift.policies import modalities
from nightshift.policies.base import Inputs, Shapes
from nightshift.policies.encoders import Normaliser
from nightshift.policies.heads import HEADS, HeadPolicy
from nightshift.types import Observation

FAMILY = "residual"


class ResidualSettings(PolicySettings):
    """The section `policy` of params.yaml."""

    family: Literal["residual"]
    head: GaussianHead
    width: Count
    """Features of every block."""
    blocks: Count


class Residual(HeadPolicy):
    def __init__(
        self, *, inputs: Mapping[str, int], width: int, blocks: int, head: str, chunk: int, action_dim: int
    ) -> None:
        """`inputs` maps the names of observations to their sizes."""
        super().__init__(chunk=chunk, action_dim=action_dim)
        self._spec = {"inputs": dict(inputs), "width": width, "blocks": blocks, "head": head}
        self.head = HEADS[head](action_dim)
        self.normalise = Normaliser(sum(inputs.values()))
        self.first = nn.Linear(sum(inputs.values()), width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(blocks)
        )
        self.last = nn.Linear(width, chunk * action_dim * self.head.outputs_per_dim)

    @classmethod
    def from_config(cls, settings: ResidualSettings, shapes: Shapes, action_dim: int) -> Residual:
        selected = modalities.select(settings.inputs, shapes)
        return cls(
            inputs={name: shape[0] for name, shape in selected.items()},
            width=settings.width,
            blocks=settings.blocks,
            head=settings.head,
            chunk=settings.chunk,
            action_dim=action_dim,
        )

    @property
    def spec(self) -> Mapping[str, Any]:
        """JSON with the family and the arguments of __init__: `policy.json` beside the weights."""
        return {"family": FAMILY, **self._spec, "chunk": self.chunk, "action_dim": self.action_dim}

    @property
    def shapes(self) -> Shapes:
        return {name: (size,) for name, size in self._spec["inputs"].items()}

    @property
    def critic_size(self) -> int:
        return sum(self._spec["inputs"].values())

    def normalise_by(self, statistics: Mapping[str, Mapping[str, Any]]) -> None:
        self.normalise.normalise_by(*(statistics[f"observations.{name}"] for name in self._spec["inputs"]))
        self.head.normalise_by(statistics["actions"])

    def inputs(self, observations: Observation) -> dict[str, Tensor]:
        vectors = [modalities.observed(observations, name) for name in self._spec["inputs"]]
        return {"state": torch.from_numpy(np.concatenate(vectors, axis=-1))}

    def encode(self, inputs: Inputs) -> Tensor:
        """What a critic sees, too."""
        normalised: Tensor = self.normalise(inputs["state"])
        return normalised

    def decode(self, encoded: Tensor) -> Tensor:
        """The outputs [B, C, A, P] from which the head makes a distribution of actions."""
        features: Tensor = self.first(encoded)
        for block in self.blocks:
            features = features + block(features)
        outputs: Tensor = self.last(features)
        return outputs.reshape(-1, self.chunk, self.action_dim, self.head.outputs_per_dim)
