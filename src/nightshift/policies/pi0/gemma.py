"""Gemma as pi0 uses it: two transformers of one depth, whose layers attend to the same keys and values.

The parameter names are those of transformers. The prefix (images and prompt) goes through PaliGemma's Gemma once and
leaves keys and values; the suffix (state and noisy actions) goes through the expert, and attends to them and to itself.
"""

from __future__ import annotations

import math
from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

_EPS = 1e-6
_ROPE_BASE = 10_000.0

KeysValues = tuple[Tensor, Tensor]
"""Of tokens in one layer, rotated: both [B, key-value heads, T, head width]."""
Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of the angles of rotary embeddings, each [B, 1, T, head width]."""


class AttentionSpec(TypedDict):
    """What both transformers share."""

    heads: int
    key_value_heads: int
    head_width: int


class GemmaSpec(TypedDict):
    width: int
    mlp: int


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, tokens: Tensor) -> Tensor:
        """In float32; weights are relative to 1."""
        return (_normed(tokens) * (1 + self.weight.float())).to(tokens.dtype)


class AdaptiveRmsNorm(nn.Module):
    """Of pi0.5: a condition scales and shifts the normed tokens, and gates what the layer makes of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, 3 * width)

    def forward(self, tokens: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B, T, width] by the condition [B, width], and the gate [B, 1, width]."""
        scale, shift, gate = self.dense(condition)[:, None].chunk(3, dim=-1)
        return (_normed(tokens) * (1 + scale.float()) + shift.float()).to(tokens.dtype), gate


class Attention(nn.Module):
    def __init__(self, width: int, spec: AttentionSpec) -> None:
        super().__init__()
        self._spec = spec
        queries, keys = spec["heads"] * spec["head_width"], spec["key_value_heads"] * spec["head_width"]
        self.q_proj = nn.Linear(width, queries, bias=False)
        self.k_proj = nn.Linear(width, keys, bias=False)
        self.v_proj = nn.Linear(width, keys, bias=False)
        self.o_proj = nn.Linear(queries, width, bias=False)

    def keys_values(self, tokens: Tensor, rotation: Rotation) -> KeysValues:
        keys, values = (self._split(project(tokens)) for project in (self.k_proj, self.v_proj))
        return rotated(keys, rotation), values

    def forward(self, tokens: Tensor, rotation: Rotation, mask: Tensor, attended: KeysValues) -> Tensor:
        keys, values = attended
        queries = rotated(self._split(self.q_proj(tokens)), rotation)
        found = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
        output: Tensor = self.o_proj(found.transpose(1, 2).flatten(2))
        return output

    def _split(self, projected: Tensor) -> Tensor:
        """[B, T, heads * head width] to [B, heads, T, head width]."""
        batch, count, width = projected.shape
        head_width = self._spec["head_width"]
        return projected.reshape(batch, count, width // head_width, head_width).transpose(1, 2)


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        gate = functional.gelu(self.gate_proj(tokens), approximate="tanh")
        output: Tensor = self.down_proj(gate * self.up_proj(tokens))
        return output


class DecoderLayer(nn.Module):
    def __init__(self, spec: GemmaSpec, attention: AttentionSpec) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(spec["width"])
        self.self_attn = Attention(spec["width"], attention)
        self.post_attention_layernorm = RmsNorm(spec["width"])
        self.mlp = Mlp(spec["width"], spec["mlp"])

    def forward(
        self, tokens: Tensor, rotation: Rotation, mask: Tensor, memory: KeysValues | None = None
    ) -> tuple[Tensor, KeysValues]:
        """The tokens after the layer, and their keys and values in it. They attend to `memory`, too, which comes first
        in the mask."""
        normed = self.input_layernorm(tokens)
        own = self.self_attn.keys_values(normed, rotation)
        attended = own if memory is None else joined(memory, own)
        tokens = tokens + self.self_attn(normed, rotation, mask, attended)
        mixed: Tensor = self.mlp(self.post_attention_layernorm(tokens))
        return tokens + mixed, own


class AdaptiveDecoderLayer(nn.Module):
    """Of pi0.5's expert."""

    def __init__(self, spec: GemmaSpec, attention: AttentionSpec) -> None:
        super().__init__()
        self.input_layernorm = AdaptiveRmsNorm(spec["width"])
        self.self_attn = Attention(spec["width"], attention)
        self.post_attention_layernorm = AdaptiveRmsNorm(spec["width"])
        self.mlp = Mlp(spec["width"], spec["mlp"])

    def forward(
        self, tokens: Tensor, rotation: Rotation, mask: Tensor, memory: KeysValues, condition: Tensor
    ) -> Tensor:
        """The tokens after the layer. They attend to `memory`, which comes first in the mask, and to themselves."""
        normed, gate = self.input_layernorm(tokens, condition)
        attended = joined(memory, self.self_attn.keys_values(normed, rotation))
        tokens = tokens + gate * self.self_attn(normed, rotation, mask, attended)
        normed, gate = self.post_attention_layernorm(tokens, condition)
        output: Tensor = tokens + gate * self.mlp(normed)
        return output


class LastPrefixLayer(nn.Module):
    """Of the last layer of the prefix only keys and values are read: its other weights are neither loaded nor
    computed."""

    def __init__(self, spec: GemmaSpec, attention: AttentionSpec) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(spec["width"])
        self.self_attn = Attention(spec["width"], attention)
        del self.self_attn.q_proj, self.self_attn.o_proj

    def forward(self, tokens: Tensor, rotation: Rotation) -> KeysValues:
        return self.self_attn.keys_values(self.input_layernorm(tokens), rotation)


def joined(first: KeysValues, second: KeysValues) -> KeysValues:
    return torch.cat([first[0], second[0]], dim=2), torch.cat([first[1], second[1]], dim=2)


def _normed(tokens: Tensor) -> Tensor:
    """In float32: squares of bfloat16 lose too much."""
    wide = tokens.float()
    normed: Tensor = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPS)
    return normed


def rotation_of(positions: Tensor, width: int, dtype: torch.dtype) -> Rotation:
    """Of tokens at `positions` [B, T], for heads of this width."""
    exponents = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width
    angles = positions[:, None, :, None].float() / _ROPE_BASE**exponents
    both = torch.cat([angles, angles], dim=-1)
    return both.cos().to(dtype), both.sin().to(dtype)


def rotated(heads: Tensor, rotation: Rotation) -> Tensor:
    cosine, sine = rotation
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat([-second, first], dim=-1) * sine


def embedding_scale(width: int) -> float:
    """Of words; images are not scaled."""
    return math.sqrt(width)
