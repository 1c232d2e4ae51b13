"""A vision transformer with the parameter names of timm, which published OpenVLA checkpoints have."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from nightshift.policies.initialisation import grid_positions, initialise, residual_gain

PATCH = 14
"""Pixels of a square patch, in both towers."""
_EPS = 1e-6
_INIT_STD = 0.02
_LAYER_SCALE = 0.1
"""Of random weights. DINOv2 starts training at 1e-5, where a short training would never hear the tower."""


class TransformerSpec(TypedDict):
    width: int
    mlp: int
    depth: int
    heads: int


class TowerSpec(TransformerSpec):
    """What a tower is built from. `depth` counts the blocks that are computed: a published tower has one more, whose
    output nothing reads."""

    registers: int
    """Tokens before the patches beside the class token; -1 = neither, as SigLIP."""
    layer_scale: bool


class PatchEmbed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, PATCH, PATCH)
        initialise(self.proj)

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] to [B, N, width], row by row."""
        patches: Tensor = self.proj(images).flatten(2).transpose(1, 2)
        return patches


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        batch, count, width = tokens.shape
        joint = self.qkv(tokens).reshape(batch, count, 3, self.heads, width // self.heads)
        queries, keys, values = joint.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(queries, keys, values)
        output: Tensor = self.proj(attended.transpose(1, 2).reshape(batch, count, width))
        return output


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.activation = activation

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.fc2(self.activation(self.fc1(tokens)))
        return output


class LayerScale(nn.Module):
    """A learned factor per feature; OpenVLA renamed timm's `gamma`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.full((width,), _LAYER_SCALE))

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens * self.scale_factor


class Block(nn.Module):
    """Pre-norm attention and MLP. Both published towers have the exact GELU, not its tanh approximation."""

    def __init__(self, spec: TowerSpec) -> None:
        super().__init__()
        width = spec["width"]
        self.norm1 = nn.LayerNorm(width, eps=_EPS)
        self.attn = Attention(width, spec["heads"])
        self.norm2 = nn.LayerNorm(width, eps=_EPS)
        self.mlp = Mlp(width, spec["mlp"], functional.gelu)
        self._initialise(residual_gain(spec["depth"]))
        self.ls1: nn.Module = LayerScale(width) if spec["layer_scale"] else nn.Identity()
        self.ls2: nn.Module = LayerScale(width) if spec["layer_scale"] else nn.Identity()

    def _initialise(self, added: float) -> None:
        initialise(self.attn.qkv)
        initialise(self.attn.proj, added)
        initialise(self.mlp.fc1)
        initialise(self.mlp.fc2, added)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.ls1(self.attn(self.norm1(tokens)))
        mixed: Tensor = self.ls2(self.mlp(self.norm2(tokens)))
        return tokens + mixed


class VisionTransformer(nn.Module):
    """Images [B, 3, H, W] to features of their patches [B, N, width], without a final norm."""

    def __init__(self, spec: TowerSpec, image_size: int) -> None:
        super().__init__()
        self.width = spec["width"]
        self.prefix = spec["registers"] + 1
        if self.prefix:
            self.cls_token = nn.Parameter(torch.randn(1, 1, self.width) * _INIT_STD)
            self.reg_token = nn.Parameter(torch.randn(1, spec["registers"], self.width) * _INIT_STD)
        side = image_size // PATCH
        self.pos_embed = nn.Parameter(grid_positions(side, side, self.width))
        self.patch_embed = PatchEmbed(self.width)
        self.blocks = nn.Sequential(*[Block(spec) for _ in range(spec["depth"])])

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patch_embed(images) + self.pos_embed
        if self.prefix:
            prefix = torch.cat([self.cls_token, self.reg_token], dim=1)
            tokens = torch.cat([prefix.expand(len(tokens), -1, -1), tokens], dim=1)
        features: Tensor = self.blocks(tokens)
        return features[:, self.prefix :]
