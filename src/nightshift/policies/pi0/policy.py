"""The policy family `pi0`: published weights, trained further by cloning and reinforcement learning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack

import torch
from torch import Tensor
from torch.nn import functional

from nightshift.errors import ConfigError, DataError
from nightshift.policies.base import Inputs, Shapes
from nightshift.policies.denoising import DenoisingSpec, FlowPolicy, denoising, denoising_spec
from nightshift.policies.lora import adapt, lora_spec
from nightshift.policies.modalities import Modalities, select
from nightshift.policies.pi0 import norm_stats, prompt
from nightshift.policies.pi0.checkpoint import Pi0Checkpoint, published_name
from nightshift.policies.pi0.images import resize_with_pad
from nightshift.policies.pi0.network import NetworkSpec, Pi0Network, Prefix
from nightshift.policies.pi0.norm_stats import MomentsSpec
from nightshift.policies.pi0.prompt import PAD, Prompts
from nightshift.policies.pi0.siglip import PATCH, scaled
from nightshift.policies.published import BaseSpec, PublishedPolicy, PublishedPolicySpec, require_published_state
from nightshift.policies.tokenizer import TokenizerSpec
from nightshift.types import INSTRUCTION

if TYPE_CHECKING:
    from nightshift import config

FAMILY = "pi0"
Train = Literal["expert", "language_model", "all"]
UNTRAINED: Mapping[Train, Sequence[str]] = {
    "expert": ("vision_tower", "projector", "language_model"),
    "language_model": ("vision_tower",),
    "all": (),
}
"""Parts of the network that training leaves as they are."""
_MOVES = 6
"""Dimensions of an action that move the hand; the last is the gripper."""


class Pi0Spec(DenoisingSpec, PublishedPolicySpec):
    network: NetworkSpec
    chunk: int
    action_dim: int
    train: Train
    delta_actions: bool
    actions: MomentsSpec
    state: MomentsSpec
    tokenizer: TokenizerSpec


class Context(NamedTuple):
    prefix: Prefix
    state: Tensor  # [B, state_dim] normalised, with zeros after the last dimension


class Pi0(PublishedPolicy, FlowPolicy[Context]):
    family = FAMILY
    network_type = Pi0Network
    network: Pi0Network
    freezes_vision = "policy.train: expert or language_model"
    state_mean: Tensor
    state_std: Tensor
    _spec: Pi0Spec

    def __init__(self, loaded: Pi0Network | None = None, /, **spec: Unpack[Pi0Spec]) -> None:
        """`loaded` is a network with weights; None makes one with random weights."""
        network = Pi0Network(spec["network"]) if loaded is None else loaded
        super().__init__(spec, network, chunk=spec["chunk"], action_dim=spec["action_dim"])
        self.denoising = denoising(spec, spec["network"]["expert"]["width"], spec["network"]["action_dim"])
        self.register_denoising_buffers()
        self.register_buffer("state_mean", torch.tensor(spec["state"]["mean"]))
        self.register_buffer("state_std", torch.tensor(spec["state"]["std"]))
        self.action_mean.copy_(torch.tensor(spec["actions"]["mean"]))
        self.action_std.copy_(torch.tensor(spec["actions"]["std"]))
        self.prompts = Prompts(spec["tokenizer"], spec["max_tokens"])

    @classmethod
    def from_config(cls, settings: config.Pi0, shapes: Shapes, action_dim: int) -> Pi0:
        """All is checked before the first weight is read, and where tensors are on the meta device none is."""
        inputs = select(settings.inputs, shapes)
        require_published_state(inputs, shapes)
        checkpoint = Pi0Checkpoint.open(Path(settings.checkpoint.path))
        network_spec = checkpoint.network_spec(settings.horizon)
        is_pi05, vectors = network_spec["adaptive_norms"], _vectors(settings, inputs, network_spec)
        _require_actions(network_spec["action_dim"], action_dim)
        statistics = norm_stats.read(Path(settings.checkpoint.norm_stats))
        spec: Pi0Spec = {
            **denoising_spec(settings),
            "base": {"path": settings.checkpoint.path, "adapter": None},
            "inputs": inputs,
            "network": network_spec,
            "chunk": settings.chunk,
            "action_dim": action_dim,
            "max_tokens": settings.max_tokens,
            "train": settings.train,
            "delta_actions": settings.checkpoint.delta_actions,
            "actions": statistics.moments("actions", action_dim, quantiles=is_pi05),
            "state": statistics.moments("state", vectors, quantiles=is_pi05),
            "tokenizer": prompt.read_tokenizer(Path(settings.checkpoint.tokenizer), network_spec["vocabulary"]),
            "augmentation": {"crop": settings.augmentation.crop, "jitter": settings.augmentation.jitter},
            "lora": lora_spec(settings.lora),
            "reuse_vision_features": settings.reuse_vision_features,
        }
        with torch.device("meta"):
            network = Pi0Network(network_spec)
        checkpoint.check(network)
        if torch.get_default_device().type != "meta":
            checkpoint.load(network, torch.float32)
        return cls(network, **spec)

    @classmethod
    def read_network(cls, base: BaseSpec, spec: NetworkSpec) -> Pi0Network:
        checkpoint = Pi0Checkpoint.open(Path(base["path"]))
        with torch.device("meta"):
            network = Pi0Network(spec)
        checkpoint.check(network)
        checkpoint.load(network, torch.float32)
        return network

    @property
    def horizon(self) -> int:
        return self._spec["network"]["horizon"]

    @property
    def noise_dim(self) -> int:
        return self._spec["network"]["action_dim"]

    @property
    def critic_size(self) -> int:
        return self._spec["network"]["gemma"]["width"] + len(self._spec["state"]["mean"])

    def normalise_by(self, statistics: Mapping[str, Mapping[str, Any]]) -> None:
        """Statistics of a checkpoint belong to its weights: those of the demos do not replace them."""

    def preprocess(self, images: Tensor) -> Tensor:
        return resize_with_pad(images, self._spec["network"]["image_size"])

    def normalise_actions(self, actions: Tensor, inputs: Inputs) -> Tensor:
        return super().normalise_actions(actions - self._moved_from(inputs), inputs)

    def unnormalise_actions(self, denoised: Tensor, inputs: Inputs) -> Tensor:
        return super().unnormalise_actions(denoised, inputs) + self._moved_from(inputs)

    def encode(self, inputs: Inputs) -> Tensor:
        """The mean of the prefix's tokens, without padding, and the normalised state, which is not in the prefix:
        [B, width + state] in float32."""
        prefix, state = self.context(inputs)
        present = prefix.present[..., None]
        pooled = (prefix.hidden.float() * present).sum(1) / present.sum(1)
        return torch.cat([pooled, state[:, : len(self.state_mean)]], dim=-1)

    def see(self, inputs: Inputs) -> Tensor:
        images = torch.stack([scaled(inputs[name]) for name in self.modalities.cameras], dim=1)
        with self._autocast():
            return self.network.see(images)

    @property
    def features_shape(self) -> tuple[int, int]:
        network = self._spec["network"]
        patches = (network["image_size"] // PATCH) ** 2
        return patches * len(self.modalities.cameras), network["siglip"]["width"]

    @property
    def tokens_per_decision(self) -> int:
        """The prefix's, and those of the suffix for every Gaussian step."""
        prefix = self.features_shape[0] + self._spec["max_tokens"]
        suffix = bool(self._spec["network"]["state_dim"]) + self.horizon
        return prefix + self.denoising.gaussian_steps * suffix

    def context(self, inputs: Inputs) -> Context:
        words = inputs[INSTRUCTION].long()
        cameras = torch.ones(len(words), len(self.modalities.cameras), dtype=torch.bool, device=self.device)
        state = (self._state(inputs) - self.state_mean) / self.state_std
        with self._autocast():
            prefix = self.network.prefix(self.vision_features(inputs), cameras, words, words != PAD)
        return Context(prefix, functional.pad(state, (0, self._spec["network"]["state_dim"] - state.shape[1])))

    def velocity(self, noisy: Tensor, times: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        with self._autocast():
            velocity, hidden = self.network.velocity(context.state, noisy, times, context.prefix)
        return velocity.float(), hidden.float()

    def published_tensors(self, base: BaseSpec) -> Iterable[tuple[str, Tensor]]:
        if base["adapter"] is not None:
            raise DataError(f"{FAMILY} takes no published adapter, and {base['adapter']} is one", "leave out --adapter")
        checkpoint = Pi0Checkpoint.open(Path(base["path"]))
        checkpoint.check(self.network)
        return checkpoint.replaced(self.network)

    def published_name(self, name: str) -> str:
        return published_name(name)

    def _freeze(self) -> None:
        untrained = [self.network.get_submodule(name) for name in UNTRAINED[self._spec["train"]]]
        if self._spec["lora"] is not None:
            adapt(self.network, self._spec["lora"], untrained=untrained)
        for part in untrained:
            part.requires_grad_(False)

    def _state(self, inputs: Inputs) -> Tensor:
        """[B, D]; pi0.5 sees none."""
        nothing = torch.zeros(len(inputs[INSTRUCTION]), 0, device=self.device)
        return torch.cat([nothing, *(inputs[name] for name in self.modalities.vectors)], dim=-1)

    def _moved_from(self, inputs: Inputs) -> Tensor:
        """The state that the network's actions are relative to, [B, 1, A]; zeros where they are the simulator's."""
        state = self._state(inputs)
        moved = state[:, :_MOVES] if self._spec["delta_actions"] else state[:, :0]
        return functional.pad(moved, (0, self.action_dim - moved.shape[1]))[:, None]


def _require_actions(denoised: int, played: int) -> None:
    """The network's actions are padded: it may denoise more numbers than are played."""
    if denoised < played:
        raise DataError(
            f"the checkpoint's actions have {denoised} numbers (action_in_proj.weight), and the environment's have "
            f"{played}",
            "use a checkpoint that was made for this robot",
        )


def _vectors(settings: config.Pi0, inputs: Shapes, network: NetworkSpec) -> int:
    """The size of the state; ConfigError if these observations are not those of the checkpoint."""
    found, is_pi05 = Modalities(inputs, 0), network["adaptive_norms"]
    if not found.cameras or not found.instruction or bool(found.vectors) == is_pi05:
        takes = "no state vector" if is_pi05 else "state vectors"
        raise ConfigError(
            f"policy.inputs is {', '.join(inputs)}, and {'pi0.5' if is_pi05 else 'pi0'} takes one or more cameras, "
            f"{takes} and the {INSTRUCTION}",
            f"edit policy.inputs in params.yaml, e.g. [agentview, wrist, {'' if is_pi05 else 'state, '}instruction]",
        )
    size = sum(found.vectors.values())
    if size > network["state_dim"]:
        raise ConfigError(
            f"the state vectors of policy.inputs have {size} numbers, and the checkpoint takes {network['state_dim']}",
            "edit policy.inputs in params.yaml",
        )
    if settings.checkpoint.delta_actions and size < _MOVES:
        raise ConfigError(
            f"policy.checkpoint.delta_actions is true, and the state has {size} numbers: actions are relative to six",
            "set it to false, or add a state vector to policy.inputs",
        )
    return size
