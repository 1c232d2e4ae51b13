"""A small convolutional policy: an encoder per camera, the instruction's words, state vectors, an MLP."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor, nn

from nightshift.policies.base import Inputs, Shapes
from nightshift.policies.encoders import CameraEncoder
from nightshift.policies.heads import HEADS, HeadPolicy
from nightshift.policies.instruction import PADDING, WordEmbedding
from nightshift.policies.modalities import Modalities
from nightshift.policies.vision import VisionPolicy, VisionSpec, vision_spec
from nightshift.types import INSTRUCTION

if TYPE_CHECKING:
    from nightshift import config

FAMILY = "cnn"
_WORDS = 64
"""Features of the instruction."""


class CnnSpec(VisionSpec):
    channels: Sequence[int]
    hidden: Sequence[int]
    head: str


class InstructionEncoder(nn.Module):
    """Words [B, L] as the mean of their embeddings, normalised: [B, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = WordEmbedding(width)
        self.norm = nn.LayerNorm(width)

    def forward(self, words: Tensor) -> Tensor:
        present = (words != PADDING)[..., None]
        mean = (self.embedding(words) * present).sum(1) / present.sum(1).clamp(min=1)
        normalised: Tensor = self.norm(mean)
        return normalised


class CnnEncoder(nn.Module):
    """Inputs, with state vectors normalised, as features [B, size]: what an actor and its critics can share."""

    def __init__(self, modalities: Modalities, channels: Sequence[int], features: int) -> None:
        """`features` is the number that each camera gives."""
        super().__init__()
        self._modalities = modalities
        words = _WORDS * modalities.instruction
        self.instruction = InstructionEncoder(words) if words else None
        self.cameras = nn.ModuleDict(
            {name: CameraEncoder(image, channels, features, words) for name, image in modalities.cameras.items()}
        )
        self.size = features * len(modalities.cameras) + sum(modalities.vectors.values()) + words

    def forward(self, inputs: Inputs) -> Tensor:
        instruction = None if self.instruction is None else self.instruction(inputs[INSTRUCTION])
        features = [encode(inputs[name], instruction) for name, encode in self.cameras.items()]
        features += [inputs[name] for name in self._modalities.vectors]
        if instruction is not None:
            features.append(instruction)
        return torch.cat(features, dim=-1)


class Cnn(HeadPolicy, VisionPolicy):
    family = FAMILY

    def __init__(self, **spec: Unpack[CnnSpec]) -> None:
        super().__init__(spec)
        self.encoder = CnnEncoder(self.modalities, spec["channels"], spec["hidden"][0])
        widths = [self.encoder.size, *spec["hidden"]]
        layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
        self.head = HEADS[spec["head"]](self.action_dim)
        output = nn.Linear(widths[-1], self.chunk * self.action_dim * self.head.outputs_per_dim)
        nn.init.zeros_(output.weight)  # a fresh policy acts the same everywhere: with a Gaussian, the demos' mean
        nn.init.zeros_(output.bias)
        self.net = nn.Sequential(*layers, output)

    @classmethod
    def from_config(cls, settings: config.Cnn, shapes: Shapes, action_dim: int) -> Cnn:
        spec = vision_spec(settings, shapes, action_dim)
        return cls(**spec, channels=list(settings.channels), hidden=list(settings.hidden), head=settings.head)

    @property
    def critic_size(self) -> int:
        return self.encoder.size

    def encoder_parameters(self) -> Sequence[nn.Parameter]:
        return list(self.encoder.parameters())

    def encode(self, inputs: Inputs) -> Tensor:
        device = self.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            features: Tensor = self.encoder({**inputs, **self.normalised(inputs)})
        return features.float()

    def decode(self, encoded: Tensor) -> Tensor:
        outputs: Tensor = self.net(encoded)
        return outputs.reshape(-1, self.chunk, self.action_dim, self.head.outputs_per_dim)
