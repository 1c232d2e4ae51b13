"""What the families with published weights have in common: billions of weights, camera images and a prompt."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Self, TypedDict

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nightshift.policies.augmentation import DRAWS, augment_cameras
from nightshift.policies.base import EncoderPolicy, Inputs, Shapes
from nightshift.policies.modalities import Modalities, observed
from nightshift.policies.vision import AugmentationSpec
from nightshift.types import INSTRUCTION, Observation


class PublishedPolicySpec(TypedDict):
    inputs: Shapes
    """Cameras in the order in which the network takes them, the instruction, and state vectors."""
    max_tokens: int
    augmentation: AugmentationSpec


class PublishedNetwork(nn.Module):
    """Its constructor takes the entry `network` of the policy's spec."""

    @property
    @abstractmethod
    def transformer_blocks(self) -> list[nn.Module]:
        """As those of a policy."""


class PublishedPolicy(EncoderPolicy):
    """A policy that is a `PublishedNetwork` on cameras, state vectors and a prompt.

    Its constructor takes a network with weights, or None for random ones, and the spec by keywords.
    """

    network_type: type[PublishedNetwork]
    network: PublishedNetwork
    prompts: Callable[[NDArray[Any]], Tensor]
    """From instructions [B] to the tokens of prompts, int32 [B, L]."""
    _spec: PublishedPolicySpec

    def __init__(self, spec: PublishedPolicySpec, network: PublishedNetwork, *, chunk: int, action_dim: int) -> None:
        super().__init__(chunk=chunk, action_dim=action_dim)
        self._spec = spec
        # The instruction is a prompt here, and not words.
        self.modalities = Modalities({name: shape for name, shape in spec["inputs"].items() if name != INSTRUCTION}, 0)
        self.network = network
        self._freeze()
        # By name: who only plays with a policy may freeze all its weights.
        self._frozen = {f"network.{name}" for name, p in self.network.named_parameters() if not p.requires_grad}

    @classmethod
    def with_weights(cls, weights: Mapping[str, Tensor], **spec: Any) -> Self:
        """Takes the tensors themselves: billions of weights are neither drawn at random nor copied."""
        with torch.device("meta"):
            network = cls.network_type(spec["network"])
        build: Callable[..., Self] = cls
        policy = build(network, **spec)
        policy.load_state_dict(weights, assign=True)
        return policy

    @property
    @abstractmethod
    def family(self) -> str:
        """The name in params.yaml."""

    @property
    def spec(self) -> Mapping[str, Any]:
        return {
            "family": self.family,
            **self._spec,
            "inputs": {name: list(shape) for name, shape in self.shapes.items()},
        }

    @property
    def shapes(self) -> Shapes:
        return {name: tuple(shape) for name, shape in self._spec["inputs"].items()}

    @property
    def transformer_blocks(self) -> Sequence[nn.Module]:
        return self.network.transformer_blocks

    @property
    def frozen(self) -> Set[str]:
        return self._frozen

    def inputs(self, observations: Observation) -> dict[str, Tensor]:
        """Images as the network takes them but in bytes, state vectors, and the prompt's tokens int32 [B, L]."""
        tensors = self.modalities.tensors(observations)
        images = {name: self.preprocess(tensors[name]) for name in self.modalities.cameras}
        return {**tensors, **images, INSTRUCTION: self.prompts(observed(observations, INSTRUCTION))}

    @abstractmethod
    def preprocess(self, images: Tensor) -> Tensor:
        """A camera's images uint8 [B, H, W, 3] in the size that the network takes, uint8 too."""

    @property
    def augmentation_draws(self) -> int:
        return DRAWS * len(self.modalities.cameras)

    def augment(self, inputs: Inputs, draws: Tensor) -> Inputs:
        return augment_cameras(inputs, self.modalities.cameras, draws, **self._spec["augmentation"])

    @abstractmethod
    def _freeze(self) -> None:
        """Turn off the gradients of the weights that no training changes."""
