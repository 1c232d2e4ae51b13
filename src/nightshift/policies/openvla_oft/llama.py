"""Llama as OpenVLA uses it: embeddings in, hidden states out, in one pass without a cache.

The parameter names are those of transformers. There is no causal mask by default: OpenVLA-OFT decodes all actions in
parallel, and every token attends to every other.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from nightshift.policies.initialisation import initialise, residual_gain
from nightshift.policies.openvla_oft.vit import TransformerSpec

_EPS = 1e-6
"""OpenVLA takes LlamaConfig's default, not the 1e-5 of Llama 2."""
_ROPE_BASE = 10_000.0
_INIT_STD = 0.02


class LlamaSpec(TransformerSpec):
    vocabulary: int


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.rms_norm(tokens, self.weight.shape, self.weight, _EPS)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, added: float) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = _linear(width, width)
        self.k_proj = _linear(width, width)
        self.v_proj = _linear(width, width)
        self.o_proj = _linear(width, width, added)

    def forward(self, tokens: Tensor, rotation: Rotation, mask: Tensor | None) -> Tensor:
        batch, count, width = tokens.shape
        split = (batch, count, self.heads, width // self.heads)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        queries, keys, values = (project(tokens).reshape(split).transpose(1, 2) for project in projections)
        attended = functional.scaled_dot_product_attention(
            _rotated(queries, rotation), _rotated(keys, rotation), values, attn_mask=mask
        )
        output: Tensor = self.o_proj(attended.transpose(1, 2).reshape(batch, count, width))
        return output


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, hidden: int, added: float) -> None:
        super().__init__()
        self.gate_proj = _linear(width, hidden)
        self.up_proj = _linear(width, hidden)
        self.down_proj = _linear(hidden, width, added)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.down_proj(functional.silu(self.gate_proj(tokens)) * self.up_proj(tokens))
        return output


class DecoderLayer(nn.Module):
    def __init__(self, spec: LlamaSpec) -> None:
        super().__init__()
        added = residual_gain(spec["depth"])
        self.input_layernorm = RmsNorm(spec["width"])
        self.self_attn = Attention(spec["width"], spec["heads"], added)
        self.post_attention_layernorm = RmsNorm(spec["width"])
        self.mlp = Mlp(spec["width"], spec["mlp"], added)

    def forward(self, tokens: Tensor, rotation: Rotation, mask: Tensor | None) -> Tensor:
        tokens = tokens + self.self_attn(self.input_layernorm(tokens), rotation, mask)
        mixed: Tensor = self.mlp(self.post_attention_layernorm(tokens))
        return tokens + mixed


class Llama(nn.Module):
    """`embed_tokens` is for the caller, who puts other tokens between words."""

    def __init__(self, spec: LlamaSpec) -> None:
        super().__init__()
        self._head_width = spec["width"] // spec["heads"]
        self.embed_tokens = nn.Embedding(spec["vocabulary"], spec["width"])
        nn.init.normal_(self.embed_tokens.weight, std=_INIT_STD)
        self.layers = nn.ModuleList([DecoderLayer(spec) for _ in range(spec["depth"])])
        self.norm = RmsNorm(spec["width"])

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Embeddings [B, T, width] at `positions` [B, T] or [1, T] to hidden states [B, T, width].

        `mask` is true where a query (last but one axis) attends to a key (last axis); None = everywhere.
        """
        rotation = _rotation(positions, self._head_width, tokens.dtype)
        for layer in self.layers:
            tokens = layer(tokens, rotation, mask)
        hidden: Tensor = self.norm(tokens)
        return hidden


Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of the angles of rotary embeddings, each [B, 1, T, head width]."""


def _rotation(positions: Tensor, width: int, dtype: torch.dtype) -> Rotation:
    exponents = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width
    angles = positions[:, None, :, None].float() / _ROPE_BASE**exponents
    both = torch.cat([angles, angles], dim=-1)
    return both.cos().to(dtype), both.sin().to(dtype)


def _rotated(heads: Tensor, rotation: Rotation) -> Tensor:
    cosine, sine = rotation
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat([-second, first], dim=-1) * sine


def _linear(inputs: int, outputs: int, gain: float = 1.0) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    initialise(layer, gain)
    return layer
