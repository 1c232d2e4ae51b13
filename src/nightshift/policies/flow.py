"""A flow policy: the transformer of vla.py with an action expert that denoises a chunk of actions (as pi0 does).

The transformer sees the observations once per decision. The expert, blocks of its own, sees the noisy actions and the
time, attends to the transformer's tokens, and says in which direction the actions are: N times per decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from nightshift.policies import flow_matching
from nightshift.policies.base import Inputs, Shapes
from nightshift.policies.denoising import DenoisingSpec, FlowPolicy, denoising, denoising_spec
from nightshift.policies.vla import (
    ExpertBlock,
    KeysValues,
    TransformerPolicy,
    TransformerSpec,
    blocks,
    transformer_spec,
)

if TYPE_CHECKING:
    from nightshift import config

FAMILY = "flow"


class FlowSpec(TransformerSpec, DenoisingSpec):
    pass


class Context(NamedTuple):
    """What the expert attends to: it does not change during the denoising of a decision."""

    observed: list[Tensor | KeysValues]
    """For each block of the expert: the tokens of the observations [B, N, width], and after the first step of a chain
    their keys and values in it."""
    mask: Tensor | None


class Flow(FlowPolicy[Context], TransformerPolicy):
    family = FAMILY

    def __init__(self, **spec: Unpack[FlowSpec]) -> None:
        super().__init__(spec)
        self.denoising = denoising(spec, self.width, self.action_dim)
        self.action_input = nn.Linear(self.action_dim, self.width)
        self.action_time = nn.Sequential(
            nn.Linear(2 * self.width, self.width), nn.SiLU(), nn.Linear(self.width, self.width)
        )
        self.expert = nn.ModuleList(blocks(ExpertBlock, spec))
        self.expert_norm = nn.LayerNorm(self.width)
        self.output = nn.Linear(self.width, self.action_dim)
        nn.init.zeros_(self.output.weight)  # a fresh policy acts noise with the demos' mean and std
        nn.init.zeros_(self.output.bias)
        self.register_denoising_buffers()

    @classmethod
    def from_config(cls, settings: config.Flow, shapes: Shapes, action_dim: int) -> Flow:
        return cls(**transformer_spec(settings, shapes, action_dim), **denoising_spec(settings))

    @property
    def transformer_blocks(self) -> Sequence[nn.Module]:
        return [*self.blocks, *self.expert]

    @property
    def tokens_per_decision(self) -> int:
        """The expert's count once for every Gaussian step."""
        return super().tokens_per_decision + (self.denoising.gaussian_steps - 1) * self.chunk

    def encode(self, inputs: Inputs) -> Tensor:
        """The mean of the tokens of the observations, without padding, [B, width] in float32."""
        tokens = self._observed(inputs)
        mask = self.attention_mask(inputs, tokens.shape[1])
        if mask is None:
            return tokens.mean(1)
        present = mask[:, 0, 0, :, None]
        return (tokens * present).sum(1) / present.sum(1)

    def context(self, inputs: Inputs) -> Context:
        tokens = self._observed(inputs)
        return Context([tokens] * len(self.expert), self.attention_mask(inputs, tokens.shape[1] + self.chunk))

    def velocity(self, noisy: Tensor, times: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """The velocity [B, C, A] at `times` [B], and the expert's tokens [B, C, width] that it is read from."""
        device = self.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            actions = self.action_input(noisy)
            time = flow_matching.time_embedding(times, self.width)[:, None].expand_as(actions)
            tokens = self.queries + self.action_time(torch.cat([actions, time], dim=-1))
            for number, block in enumerate(self.expert):
                tokens, context.observed[number] = block(tokens, context.mask, context.observed[number])
            hidden = self.expert_norm(tokens)
        hidden = hidden.float()
        return self.output(hidden), hidden

    def _observed(self, inputs: Inputs) -> Tensor:
        """The tokens of the observations after the last block, [B, N, width] in float32."""
        device = self.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            tokens = self.observation_tokens(inputs)
            mask = self.attention_mask(inputs, tokens.shape[1])
            for block in self.blocks:
                tokens = block(tokens, mask)
            encoded: Tensor = self.norm(tokens)
        return encoded.float()
