"""pi0 and pi0.5: PaliGemma sees cameras and prompt, and an action expert denoises the chunk of actions.

Prefix: the patches of every camera, the prompt; all attend to all. Suffix: the state, which attends to the prefix and
to itself, and the noisy actions, which attend to all. Padding (a camera that is not there, the end of a prompt) is
masked and takes no position.

pi0.5 has no state in its suffix, and the time is not an input of the expert but the condition of its norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from nightshift.policies.flow_matching import time_embedding
from nightshift.policies.pi0.gemma import (
    AdaptiveDecoderLayer,
    AdaptiveRmsNorm,
    AttentionSpec,
    DecoderLayer,
    GemmaSpec,
    KeysValues,
    LastPrefixLayer,
    RmsNorm,
    Rotation,
    embedding_scale,
    rotation_of,
)
from nightshift.policies.pi0.siglip import Siglip, SiglipSpec
from nightshift.policies.published import PublishedNetwork


class NetworkSpec(TypedDict):
    image_size: int
    siglip: SiglipSpec
    gemma: GemmaSpec
    expert: GemmaSpec
    attention: AttentionSpec
    depth: int
    vocabulary: int
    state_dim: int
    action_dim: int
    horizon: int
    adaptive_norms: bool
    """Whether it is pi0.5, whose state_dim is 0."""


class Prefix(NamedTuple):
    """What the expert attends to: it does not change during the denoising of a decision."""

    memories: list[KeysValues]  # one of each layer
    present: Tensor  # bool [B, P] which of the tokens are no padding
    hidden: Tensor  # [B, P, width] before the last layer, of which only keys and values are computed


class LanguageModel(nn.Module):
    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__()
        gemma, attention = spec["gemma"], spec["attention"]
        self.embed_tokens = nn.Embedding(spec["vocabulary"], gemma["width"])
        layers: list[nn.Module] = [DecoderLayer(gemma, attention) for _ in range(spec["depth"] - 1)]
        self.layers = nn.ModuleList([*layers, LastPrefixLayer(gemma, attention)])


class Expert(nn.Module):
    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__()
        self.layers = nn.ModuleList([DecoderLayer(spec["expert"], spec["attention"]) for _ in range(spec["depth"])])
        self.norm = RmsNorm(spec["expert"]["width"])

    def forward(self, tokens: Tensor, rotation: Rotation, mask: Tensor, memories: Sequence[KeysValues]) -> Tensor:
        for layer, memory in zip(self.layers, memories, strict=True):
            tokens, _ = layer(tokens, rotation, mask, memory)
        hidden: Tensor = self.norm(tokens)
        return hidden


class AdaptiveExpert(nn.Module):
    """Of pi0.5."""

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__()
        expert, attention = spec["expert"], spec["attention"]
        self.layers = nn.ModuleList([AdaptiveDecoderLayer(expert, attention) for _ in range(spec["depth"])])
        self.norm = AdaptiveRmsNorm(expert["width"])

    def forward(
        self, tokens: Tensor, rotation: Rotation, mask: Tensor, memories: Sequence[KeysValues], condition: Tensor
    ) -> Tensor:
        for layer, memory in zip(self.layers, memories, strict=True):
            tokens = layer(tokens, rotation, mask, memory, condition)
        hidden, _ = self.norm(tokens, condition)
        found: Tensor = hidden
        return found


class Pi0Network(PublishedNetwork):
    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__()
        self._spec = spec
        width = spec["expert"]["width"]
        self.vision_tower = Siglip(spec["siglip"], spec["image_size"])
        self.projector = nn.Linear(spec["siglip"]["width"], spec["gemma"]["width"])
        self.language_model = LanguageModel(spec)
        self.action_in_proj = nn.Linear(spec["action_dim"], width)
        if spec["adaptive_norms"]:
            self.expert: Expert | AdaptiveExpert = AdaptiveExpert(spec)
            self.time_mlp_in = nn.Linear(width, width)
            self.time_mlp_out = nn.Linear(width, width)
        else:
            self.expert = Expert(spec)
            self.state_proj = nn.Linear(spec["state_dim"], width)
            self.action_time_mlp_in = nn.Linear(2 * width, width)
            self.action_time_mlp_out = nn.Linear(width, width)
        self.action_out_proj = nn.Linear(width, spec["action_dim"])

    @property
    def depth(self) -> int:
        """Layers of Gemma, and of the expert."""
        return self._spec["depth"]

    @property
    def transformer_blocks(self) -> list[nn.Module]:
        return [*self.vision_tower.encoder.layers, *self.language_model.layers, *self.expert.layers]

    @property
    def vision_encoder(self) -> Siglip:
        return self.vision_tower

    def see(self, images: Tensor) -> Tensor:
        """Features [B, n N, vision width] of images [B, n, 3, H, W] of n cameras."""
        batch, cameras = images.shape[:2]
        features: Tensor = self.vision_tower(images.flatten(0, 1))
        return features.reshape(batch, cameras * features.shape[1], features.shape[2])

    def prefix(self, features: Tensor, cameras: Tensor, prompt: Tensor, words: Tensor) -> Prefix:
        """Features as those of `see`, of n cameras of which those are there where `cameras` [B, n] is true; the
        prompt's tokens [B, L], which are no padding where `words` [B, L] is true."""
        seen = self.projector(features.to(self.language_model.embed_tokens.weight.dtype))
        tokens = torch.cat([seen, self._read(prompt)], dim=1)
        patches = features.shape[1] // cameras.shape[1]
        present = torch.cat([cameras.repeat_interleave(patches, dim=1), words], dim=1)
        rotation = self._rotation(present.cumsum(1) - 1, tokens.dtype)
        mask, memories = present[:, None, None], []
        *layers, last = self.language_model.layers
        for layer in layers:
            tokens, memory = layer(tokens, rotation, mask)
            memories.append(memory)
        return Prefix([*memories, last(tokens, rotation)], present, tokens)

    def velocity(self, state: Tensor, noisy: Tensor, times: Tensor, prefix: Prefix) -> tuple[Tensor, Tensor]:
        """The velocity [B, H, A] of noisy actions at `times` [B], and the expert's tokens [B, H, width] that it is read
        from."""
        actions = self.action_in_proj(noisy)
        time = time_embedding(times, actions.shape[-1]).to(actions.dtype)
        if self._spec["adaptive_norms"]:
            hidden = self._expert(actions, prefix, 0, functional.silu(_mlp(self.time_mlp_in, self.time_mlp_out, time)))
        else:
            joint = torch.cat([actions, time[:, None].expand_as(actions)], dim=-1)
            suffix = [self.state_proj(state)[:, None], _mlp(self.action_time_mlp_in, self.action_time_mlp_out, joint)]
            hidden = self._expert(torch.cat(suffix, dim=1), prefix, 1)[:, 1:]
        return self.action_out_proj(hidden), hidden

    def _expert(self, tokens: Tensor, prefix: Prefix, states: int, *condition: Tensor) -> Tensor:
        """The suffix, of which the first `states` tokens are no actions, after the expert."""
        count = tokens.shape[1]
        positions = prefix.present.sum(1, keepdim=True) + torch.arange(count, device=tokens.device)
        rotation, mask = self._rotation(positions, tokens.dtype), suffix_mask(prefix.present, count, states)
        hidden: Tensor = self.expert(tokens, rotation, mask, prefix.memories, *condition)
        return hidden

    def _read(self, prompt: Tensor) -> Tensor:
        embedded: Tensor = self.language_model.embed_tokens(prompt)
        return embedded * embedding_scale(embedded.shape[-1])

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        return rotation_of(positions, self._spec["attention"]["head_width"], dtype)


def _mlp(first: nn.Linear, second: nn.Linear, values: Tensor) -> Tensor:
    found: Tensor = second(functional.silu(first(values)))
    return found


def suffix_mask(present: Tensor, count: int, states: int) -> Tensor:
    """What the state and the actions after it attend to, [B, 1, count, P + count]."""
    among = torch.ones(count, count, dtype=torch.bool, device=present.device)
    among[:states, states:] = False  # the state does not see the actions
    to_prefix = present[:, None, None].expand(-1, 1, count, -1)
    return torch.cat([to_prefix, among.expand(len(present), 1, -1, -1)], dim=-1)
