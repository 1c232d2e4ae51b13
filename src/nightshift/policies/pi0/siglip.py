"""SigLIP's vision tower as PaliGemma has it, with the parameter names of transformers."""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

PATCH = 14
"""Pixels of a square patch."""
_EPS = 1e-6


class SiglipSpec(TypedDict):
    width: int
    mlp: int
    depth: int
    heads: int


class Embeddings(nn.Module):
    def __init__(self, width: int, patches: int) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, width, PATCH, PATCH)
        self.position_embedding = nn.Embedding(patches, width)

    def forward(self, images: Tensor) -> Tensor:
        patches: Tensor = self.patch_embedding(images).flatten(2).transpose(1, 2)
        return patches + self.position_embedding.weight


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        batch, count, width = tokens.shape
        split = (batch, count, self.heads, width // self.heads)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        queries, keys, values = (project(tokens).reshape(split).transpose(1, 2) for project in projections)
        attended = functional.scaled_dot_product_attention(queries, keys, values)
        output: Tensor = self.out_proj(attended.transpose(1, 2).reshape(batch, count, width))
        return output


class Mlp(nn.Module):
    """With the tanh approximation of GELU; OpenVLA's SigLIP has the exact one."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.fc2(functional.gelu(self.fc1(tokens), approximate="tanh"))
        return output


class EncoderLayer(nn.Module):
    def __init__(self, spec: SiglipSpec) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(spec["width"], eps=_EPS)
        self.self_attn = Attention(spec["width"], spec["heads"])
        self.layer_norm2 = nn.LayerNorm(spec["width"], eps=_EPS)
        self.mlp = Mlp(spec["width"], spec["mlp"])

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.self_attn(self.layer_norm1(tokens))
        mixed: Tensor = self.mlp(self.layer_norm2(tokens))
        return tokens + mixed


class Encoder(nn.Module):
    def __init__(self, spec: SiglipSpec) -> None:
        super().__init__()
        self.layers = nn.ModuleList([EncoderLayer(spec) for _ in range(spec["depth"])])


class Siglip(nn.Module):
    """Images [B, 3, H, W] between -1 and 1 to features of their patches [B, N, width]."""

    def __init__(self, spec: SiglipSpec, image_size: int) -> None:
        super().__init__()
        self.embeddings = Embeddings(spec["width"], (image_size // PATCH) ** 2)
        self.encoder = Encoder(spec)
        self.post_layernorm = nn.LayerNorm(spec["width"], eps=_EPS)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embeddings(images)
        for layer in self.encoder.layers:
            tokens = layer(tokens)
        features: Tensor = self.post_layernorm(tokens)
        return features


def scaled(images: Tensor) -> Tensor:
    """Images uint8 [B, H, W, 3] as the tower takes them: [B, 3, H, W] between -1 and 1."""
    return images.permute(0, 3, 1, 2).to(torch.float32) / 127.5 - 1
