"""An MLP on low-dimensional observations, with a diagonal Gaussian for actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from nightshift.policies import modalities, readable
from nightshift.policies.base import Inputs, Shapes
from nightshift.policies.encoders import Normaliser
from nightshift.policies.heads import HEADS, HeadPolicy
from nightshift.types import Observation

if TYPE_CHECKING:
    from nightshift import config

FAMILY = "gaussian_mlp"
STATE = "state"
"""The one input: all observations side by side."""


ACTIVATIONS: Mapping[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}


class Layers(TypedDict, total=False):
    """What the hidden layers are made of, and the head."""

    activation: str
    layer_norm: bool
    head: str


class GaussianMlp(HeadPolicy):
    def __init__(
        self, *, inputs: Mapping[str, int], hidden: Sequence[int], chunk: int, action_dim: int, **layers: Unpack[Layers]
    ) -> None:
        """`inputs` maps the names of observations to their sizes."""
        super().__init__(chunk=chunk, action_dim=action_dim)
        self.sizes = dict(inputs)
        self.hidden = list(hidden)
        self._layers: Layers = {"activation": "tanh", "layer_norm": False, "head": "gaussian", **layers}
        self.head = HEADS[self._layers["head"]](action_dim)
        widths = [sum(self.sizes.values()), *self.hidden]
        hidden_layers = [module for a, b in pairwise(widths) for module in self._hidden_layer(a, b)]
        self.net = nn.Sequential(*hidden_layers, nn.Linear(widths[-1], chunk * action_dim * self.head.outputs_per_dim))
        self.normalise = Normaliser(widths[0])

    def _hidden_layer(self, inputs: int, outputs: int) -> list[nn.Module]:
        norm = [nn.LayerNorm(outputs)] if self._layers["layer_norm"] else []
        return [nn.Linear(inputs, outputs), *norm, ACTIVATIONS[self._layers["activation"]]()]

    @classmethod
    def from_config(cls, settings: config.GaussianMlp, shapes: Shapes, action_dim: int) -> GaussianMlp:
        return cls(
            inputs=readable.vectors(settings.inputs, shapes, FAMILY),
            hidden=settings.hidden,
            chunk=settings.chunk,
            action_dim=action_dim,
            activation=settings.activation,
            layer_norm=settings.layer_norm,
            head=settings.head,
        )

    @property
    def spec(self) -> Mapping[str, Any]:
        return {
            "family": FAMILY,
            "inputs": self.sizes,
            "hidden": self.hidden,
            "chunk": self.chunk,
            "action_dim": self.action_dim,
            **self._layers,
        }

    @property
    def shapes(self) -> Shapes:
        return {name: (size,) for name, size in self.sizes.items()}

    @property
    def critic_size(self) -> int:
        return sum(self.sizes.values())

    def normalise_by(self, statistics: Mapping[str, Mapping[str, Any]]) -> None:
        self.normalise.normalise_by(*(statistics[f"observations.{name}"] for name in self.sizes))
        self.head.normalise_by(statistics["actions"])

    def inputs(self, observations: Observation) -> dict[str, Tensor]:
        return {
            STATE: torch.from_numpy(
                np.concatenate([modalities.observed(observations, name) for name in self.sizes], axis=-1)
            )
        }

    def encode(self, inputs: Inputs) -> Tensor:
        normalised: Tensor = self.normalise(inputs[STATE])
        return normalised

    def decode(self, encoded: Tensor) -> Tensor:
        outputs: Tensor = self.net(encoded)
        return outputs.reshape(-1, self.chunk, self.action_dim, self.head.outputs_per_dim)
