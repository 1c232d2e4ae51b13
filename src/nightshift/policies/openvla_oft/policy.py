"""The policy family `openvla-oft`: OpenVLA-OFT and its variants, with published weights or with random ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor, nn

from nightshift.policies import lora
from nightshift.policies.base import Inputs, Shapes
from nightshift.policies.heads import HeadPolicy
from nightshift.policies.modalities import select
from nightshift.policies.openvla_oft import opening
from nightshift.policies.openvla_oft.checkpoint import save_part
from nightshift.policies.openvla_oft.heads import HEADS, Gripper
from nightshift.policies.openvla_oft.images import PREPROCESSING
from nightshift.policies.openvla_oft.network import NetworkSpec, OpenVlaOftNetwork
from nightshift.policies.openvla_oft.norm_stats import Bounds
from nightshift.policies.openvla_oft.spec import OpenVlaOftSpec
from nightshift.policies.openvla_oft.tokenizer import HashTokenizer, LlamaTokenizer, Prompts
from nightshift.policies.openvla_oft.vit import PATCH
from nightshift.policies.published import ADAPTER, BaseSpec, PublishedPolicy, require_published_state
from nightshift.types import INSTRUCTION

if TYPE_CHECKING:
    from nightshift import config

FAMILY = "openvla-oft"
_DECODERS = ("language_model.lm_head.", "action_head.")


class OpenVlaOft(PublishedPolicy, HeadPolicy):
    family = FAMILY
    network_type = OpenVlaOftNetwork
    network: OpenVlaOftNetwork
    freezes_vision = "set policy.lora, and in its targets layers of the language model alone (q_proj, gate_proj, …)"
    pixel_mean: Tensor
    pixel_std: Tensor
    _spec: OpenVlaOftSpec

    def __init__(self, loaded: OpenVlaOftNetwork | None = None, /, **spec: Unpack[OpenVlaOftSpec]) -> None:
        """`loaded` is a network with weights; None makes one with random weights."""
        parts, published = spec["network"], spec["published"]
        network = OpenVlaOftNetwork(parts) if loaded is None else loaded
        super().__init__(spec, network, chunk=parts["chunk"], action_dim=parts["action_dim"])
        gripper: Gripper = "simulator" if published is None else "openvla"
        bounds = None if published is None else published["actions"]
        self.head = HEADS[parts["action_head"]](self.action_dim, gripper, bounds)
        self.proprio_bounds = Bounds(parts["proprio"])
        if published is not None and published["proprio"] is not None:
            self.proprio_bounds.set(published["proprio"])
        self.register_buffer("pixel_mean", torch.tensor(spec["pixels"]["mean"])[:, None, None], persistent=False)
        self.register_buffer("pixel_std", torch.tensor(spec["pixels"]["std"])[:, None, None], persistent=False)
        words = HashTokenizer() if published is None else LlamaTokenizer(published["tokenizer"])
        self.prompts = Prompts(words, spec["max_tokens"])

    @classmethod
    def from_config(cls, settings: config.OpenVlaOft, shapes: Shapes, action_dim: int) -> OpenVlaOft:
        inputs = select(settings.inputs, shapes)
        if settings.checkpoint is None:
            return cls(**opening.random_spec(settings, inputs, action_dim))
        require_published_state(inputs, shapes)
        spec, network = opening.published(settings, inputs, action_dim)
        return cls(network, **spec)

    @classmethod
    def read_network(cls, base: BaseSpec, spec: NetworkSpec) -> OpenVlaOftNetwork:
        with torch.device("meta"):
            network = OpenVlaOftNetwork(spec)
        checkpoint, adapter = opening.published_files(base, network)
        checkpoint.load(network, adapter)
        return network

    @property
    def critic_size(self) -> int:
        return self._spec["network"]["llama"]["width"]

    def critic_view(self, encoded: Tensor) -> Tensor:
        """The first place's hidden state, which RLinf's value head reads too."""
        return encoded[:, 0]

    def encoder_parameters(self) -> Sequence[nn.Parameter]:
        return [p for name, p in self.network.named_parameters() if not name.startswith(_DECODERS)]

    def normalise_by(self, statistics: Mapping[str, Mapping[str, Any]]) -> None:
        """Statistics of a checkpoint belong to its weights: those of the demos do not replace them."""
        self.head.normalise_by(statistics["actions"])
        if self._spec["published"] is None:
            for name in self.modalities.vectors:
                self.proprio_bounds.set_to_demos(statistics[f"observations.{name}"])

    def preprocess(self, images: Tensor) -> Tensor:
        return PREPROCESSING[self._spec["images"]](images, self._spec["network"]["image_size"])

    def see(self, inputs: Inputs) -> Tensor:
        with self._autocast():
            return self.network.see(self._pixels(inputs))

    @property
    def features_shape(self) -> tuple[int, int]:
        patches = (self._spec["network"]["image_size"] // PATCH) ** 2
        return patches * len(self.modalities.cameras), self.network.vision_backbone.width

    @property
    def tokens_per_decision(self) -> int:
        return self.network.tokens(patches=self.features_shape[0], prompt=self._spec["max_tokens"])

    def encode(self, inputs: Inputs) -> Tensor:
        """Hidden states of the places of actions, [B, C A, width] in float32."""
        vectors = [self.proprio_bounds.scale(inputs[name]).clamp(-1, 1) for name in self.modalities.vectors]
        with self._autocast():
            hidden: Tensor = self.network(self.vision_features(inputs), inputs[INSTRUCTION], *vectors)
        return hidden.float()

    def decode(self, encoded: Tensor) -> Tensor:
        return self.network.decode(encoded)

    def export(self, folder: Path) -> None:
        """And what was trained whole in files of its own."""
        super().export(folder)
        if self._spec["lora"] is not None:
            for name, module in self.network.always_trained.items():
                save_part(name, module, folder / ADAPTER)

    def published_tensors(self, base: BaseSpec) -> Iterable[tuple[str, Tensor]]:
        checkpoint, adapter = opening.published_files(base, self.network)
        return checkpoint.replaced(self.network, adapter)

    def publish_parts(self, base: BaseSpec, folder: Path) -> None:
        checkpoint, _ = opening.published_files(base, self.network)
        adapter = None if base["adapter"] is None else Path(base["adapter"])
        checkpoint.copy_parts(self.network, adapter, folder)

    def _pixels(self, inputs: Inputs) -> Tensor:
        """Normalised for both towers, [B, 6 n, H, W] of n cameras."""
        images = [inputs[name].permute(0, 3, 1, 2) / 255 for name in self.modalities.cameras]
        return torch.cat([(image.repeat(1, 2, 1, 1) - self.pixel_mean) / self.pixel_std for image in images], dim=1)

    def _freeze(self) -> None:
        if self._spec["lora"] is not None:
            lora.adapt(self.network, self._spec["lora"], trained_whole=list(self.network.always_trained.values()))
