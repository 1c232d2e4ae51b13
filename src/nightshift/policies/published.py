"""What the families with published weights have in common: billions of weights, camera images and a prompt."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NotRequired, Self, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nightshift.errors import ConfigError
from nightshift.policies.augmentation import DRAWS, augment_cameras
from nightshift.policies.base import Decision, EncoderPolicy, Inputs, Shapes
from nightshift.policies.lora import LoraSpec, adapters, save_adapter
from nightshift.policies.modalities import Modalities, observed
from nightshift.policies.vision import AugmentationSpec
from nightshift.types import INSTRUCTION, Observation

ADAPTER = "adapter"
"""The folder of an adapter, beside the policy's files."""
_IMAGES_ON_CPU = 4
"""Images that are preprocessed at once: so few fit into a core's cache as 32-bit numbers."""
_IMAGES_ON_GPU = 256
"""All those of an iteration would take four times their memory."""
_ON_GPU = threading.Lock()
"""One thread at a time prepares images on the GPU: several read demos ahead, and memory is short there."""
_PROPRIO, _STATE = "proprio", "state"
"""LIBERO's own vector. It has as many numbers as `state`, so that no shape tells them apart."""
VISION_FEATURES = "vision_features"
"""The latent of that name, [B, N, width]: the vision encoder's features of N patches of all cameras."""


class BaseSpec(TypedDict):
    """The published weights that a policy began with."""

    path: str
    """As params.yaml has it."""
    adapter: str | None
    """That of a published adapter, which was merged into them."""


class PublishedPolicySpec(TypedDict):
    base: NotRequired[BaseSpec | None]
    """None = random weights. Policies of older versions do not say it."""
    inputs: Shapes
    """Cameras in the order in which the network takes them, the instruction, and state vectors."""
    max_tokens: int
    augmentation: AugmentationSpec
    lora: LoraSpec | None
    """None = weights themselves are trained."""
    reuse_vision_features: bool
    """Whether `decide` records them, and the update takes them in the place of images."""


def require_published_state(inputs: Iterable[str], offered: Shapes) -> None:
    """ConfigError: a published checkpoint would read another vector than it was trained on."""
    if _PROPRIO in inputs and _STATE in offered:
        raise ConfigError(
            f"policy.inputs has {_PROPRIO}, whose rotation is relative to facing down, and published checkpoints take "
            f"robosuite's rotation, which is in {_STATE}",
            f"write {_STATE} in place of {_PROPRIO} in policy.inputs of params.yaml",
        )


class PublishedNetwork(nn.Module, ABC):
    """Its constructor takes the entry `network` of the policy's spec."""

    projector: nn.Module
    """From the features of images to tokens of the language model."""

    @property
    @abstractmethod
    def transformer_blocks(self) -> list[nn.Module]:
        """As those of a policy."""

    @property
    @abstractmethod
    def vision_encoder(self) -> nn.Module:
        """What makes features of images, before the projector."""


class PublishedPolicy(EncoderPolicy):
    """A policy that is a `PublishedNetwork` on cameras, state vectors and a prompt.

    Its constructor takes a network with weights, or None for random ones, and the spec by keywords.
    """

    network_type: type[PublishedNetwork]
    network: PublishedNetwork
    freezes_vision: str
    """What to change in params.yaml so that the vision encoder is not trained."""
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
        if spec["reuse_vision_features"]:
            _require_frozen(network.vision_encoder, self.freezes_vision)
        # By name: who only plays with a policy may freeze all its weights.
        self._frozen = {f"network.{name}" for name, p in self.network.named_parameters() if not p.requires_grad}

    @classmethod
    def with_weights(cls, weights: Mapping[str, Tensor], **spec: Any) -> Self:
        """Takes the tensors themselves: billions of weights are neither drawn at random nor copied, but for those that
        an older Nightshift saved in another dtype."""
        with torch.device("meta"):
            network = cls.network_type(spec["network"])
        build: Callable[..., Self] = cls
        policy = build(network, **spec)
        dtypes = {name: tensor.dtype for name, tensor in policy.state_dict().items()}
        own = {name: tensor.to(dtypes.get(name, tensor.dtype)) for name, tensor in weights.items()}
        policy.load_state_dict(own, assign=True)
        return policy

    @classmethod
    @abstractmethod
    def read_network(cls, base: BaseSpec, spec: Any) -> PublishedNetwork:
        """The network of this spec with published weights; DataError if they do not fit."""

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
    def architecture(self) -> Mapping[str, Any]:
        return {name: value for name, value in self.spec.items() if name not in ("reuse_vision_features", "base")}

    @property
    def base(self) -> BaseSpec | None:
        return self._spec.get("base")

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
        return self._tensors(observations, self.observations)

    @property
    def update_observations(self) -> Sequence[str]:
        images = self.modalities.cameras if self._spec["reuse_vision_features"] else ()
        return [name for name in self.observations if name not in images]

    def update_inputs(self, observations: Observation, latents: Inputs) -> dict[str, Tensor]:
        return {**self._tensors(observations, self.update_observations), **latents}

    def decide(self, inputs: Inputs, generators: Sequence[np.random.Generator], temperature: float) -> Decision:
        if not self._spec["reuse_vision_features"]:
            return super().decide(inputs, generators, temperature)
        features = {VISION_FEATURES: self._as_projected(self.see(inputs))}
        decision = super().decide({**inputs, **features}, generators, temperature)
        return decision._replace(latents={**decision.latents, **features})

    def idle_latents(self, count: int) -> Inputs:
        latents = super().idle_latents(count)
        if not self._spec["reuse_vision_features"]:
            return latents
        dtype = next(self.network.projector.parameters()).dtype
        features = self._as_projected(torch.zeros(count, *self.features_shape, dtype=dtype))
        return {**latents, VISION_FEATURES: features}

    def vision_features(self, inputs: Inputs) -> Tensor:
        """Those that were recorded, or else those of the images: [B, N, width]."""
        return inputs[VISION_FEATURES] if VISION_FEATURES in inputs else self.see(inputs)

    @abstractmethod
    def see(self, inputs: Inputs) -> Tensor:
        """The vision encoder's features of the images, [B, N, width]."""

    @property
    @abstractmethod
    def features_shape(self) -> tuple[int, int]:
        """N and width."""

    @abstractmethod
    def preprocess(self, images: Tensor) -> Tensor:
        """A camera's images uint8 [B, H, W, 3] in the size that the network takes, uint8 too."""

    @property
    def augmentation_draws(self) -> int:
        return DRAWS * len(self.modalities.cameras)

    def augment(self, inputs: Inputs, draws: Tensor) -> Inputs:
        return augment_cameras(inputs, self.modalities.cameras, draws, **self._spec["augmentation"])

    def export(self, folder: Path) -> None:
        """The adapter as peft reads it."""
        if self._spec["lora"] is not None:
            (folder / ADAPTER).mkdir()
            save_adapter(self.network, self._spec["lora"], folder / ADAPTER, self.published_name)

    def without_adapters(self) -> Self:
        """The same policy without adapters, which are merged into the weights, of this one as well: layer by layer, so
        that there is never a second copy of all weights."""
        if self._spec["lora"] is None:
            return self
        for _, layer in adapters(self.network):
            layer.merge()
        weights = {name: tensor for name, tensor in self.state_dict().items() if ".lora_" not in name}
        # Without adapters the vision encoder may be one that is trained, whose features cannot be reused.
        return self.with_weights(weights, **{**self._spec, "lora": None, "reuse_vision_features": False})

    @abstractmethod
    def published_tensors(self, base: BaseSpec) -> Iterable[tuple[str, Tensor]]:
        """One by one, every tensor of a published checkpoint by its name there, with the weights of this policy, which
        has no adapters."""

    def publish_parts(self, base: BaseSpec, folder: Path) -> None:
        """Write modules that published checkpoints have in files of their own; most have none."""
        return

    def published_name(self, name: str) -> str:
        """The name that published checkpoints have for a tensor of the network."""
        return name

    def _tensors(self, observations: Observation, names: Sequence[str]) -> dict[str, Tensor]:
        return {name: self._tensor(observations, name) for name in names}

    def _tensor(self, observations: Observation, name: str) -> Tensor:
        if name == INSTRUCTION:
            return self.prompts(observed(observations, name))
        tensor = self.modalities.tensor(observations, name)
        return self._preprocessed(tensor) if name in self.modalities.cameras else tensor

    def _preprocessed(self, images: Tensor) -> Tensor:
        """On a GPU where the policy is on one: there and back is cheap, and a JPEG round trip takes a core 20 ms."""
        if self.device.type != "cuda":
            return torch.cat([self.preprocess(part) for part in torch.split(images, _IMAGES_ON_CPU)])
        with _ON_GPU:
            parts = torch.split(images, _IMAGES_ON_GPU)
            return torch.cat([self.preprocess(part.to(self.device)).cpu() for part in parts])

    @abstractmethod
    def _freeze(self) -> None:
        """Turn off the gradients of the weights that no training changes."""

    def _autocast(self) -> torch.autocast:
        """Matrix products in bfloat16 on a GPU, whatever the dtype of the weights."""
        device = self.device.type
        return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")

    def _as_projected(self, features: Tensor) -> Tensor:
        """In the dtype that the projector computes with, so that nothing is lost: on a GPU autocast rounds."""
        return features.bfloat16() if self.device.type == "cuda" else features


def _require_frozen(vision_encoder: nn.Module, advice: str) -> None:
    if any(parameter.requires_grad for parameter in vision_encoder.parameters()):
        raise ConfigError(
            "policy.reuse_vision_features is true, and training changes the vision encoder: features of the rollout "
            "would be those of another encoder in the update",
            f"{advice}; or reuse_vision_features: false, in params.yaml",
        )
