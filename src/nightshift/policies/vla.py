"""A compact vision-language-action transformer.

Tokens are patches of every camera, words of the instruction, state vectors, and one learned query per action of the
chunk. All attend to all, and the queries come out as the actions of the chunk, decoded in parallel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional

from nightshift.policies import readable
from nightshift.policies.base import Inputs, Shapes
from nightshift.policies.encoders import ConvStem
from nightshift.policies.heads import HEADS, HeadPolicy
from nightshift.policies.initialisation import grid_positions, initialise, residual_gain
from nightshift.policies.instruction import PADDING, WordEmbedding
from nightshift.policies.vision import VisionPolicy, VisionSpec, vision_spec
from nightshift.types import INSTRUCTION

if TYPE_CHECKING:
    from nightshift import config

FAMILY = "vla"
_INIT_STD = 0.02
_MIN_CHANNELS = 32
"""Of the first convolutions of a stem."""


class TransformerSpec(VisionSpec):
    patch_size: int
    width: int
    depth: int
    heads: int


class VlaSpec(TransformerSpec):
    head: Literal["gaussian", "bins", "tanh_gaussian"]


KeysValues = tuple[Tensor, Tensor]
"""Of tokens, in one block: both [B, heads, N, width / heads]."""


class PatchTokens(nn.Module):
    """A camera's images uint8 [B, H, W, 3] as tokens [B, N, width], one per patch.

    A few strided convolutions make the patches: trained from scratch on few demos, they learn faster than one linear
    layer ("Early Convolutions Help Transformers See Better", Xiao et al. 2021).
    """

    def __init__(self, image: tuple[int, int], patch_size: int, width: int) -> None:
        super().__init__()
        strides = _prime_factors(patch_size)
        halvings = range(len(strides) - 1, -1, -1)
        channels = [max(width >> power, min(_MIN_CHANNELS, width)) for power in halvings]
        self.stem = ConvStem(channels, strides, nn.GELU)
        self.project = nn.Conv2d([3, *channels][-1], width, 1)
        self.position = nn.Parameter(grid_positions(image[0] // patch_size, image[1] // patch_size, width))

    def forward(self, images: Tensor) -> Tensor:
        tokens: Tensor = self.project(self.stem(images)).flatten(2).transpose(1, 2)
        return tokens + self.position


class WordTokens(nn.Module):
    """Words [B, L] as tokens [B, L, width]."""

    def __init__(self, max_words: int, width: int) -> None:
        super().__init__()
        self.embedding = WordEmbedding(width)
        self.position = _embedding(max_words, width)

    def forward(self, words: Tensor) -> Tensor:
        tokens: Tensor = self.embedding(words) + self.position
        return tokens


class VectorToken(nn.Module):
    """A normalised state vector [B, D] as one token [B, 1, width]."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(size, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, vectors: Tensor) -> Tensor:
        token: Tensor = self.net(vectors)[:, None]
        return token


class BlockLayers(nn.Module):
    """Pre-norm attention and MLP, each added to the tokens [B, N, width]: the layers, without `forward`."""

    def __init__(self, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_hidden = nn.Linear(width, 4 * width)
        self.mlp_output = nn.Linear(4 * width, width)
        added = residual_gain(depth)
        initialise(self.queries_keys_values)
        initialise(self.attention_output, added)
        initialise(self.mlp_hidden)
        initialise(self.mlp_output, added)

    def _transformed(self, tokens: Tensor, mask: Tensor | None, memory: KeysValues | None = None) -> Tensor:
        """`memory`: of tokens that these attend to as well; they come first in the mask."""
        tokens = tokens + self._attend(self.attention_norm(tokens), mask, memory)
        mixed: Tensor = self.mlp_output(functional.gelu(self.mlp_hidden(self.mlp_norm(tokens))))
        return tokens + mixed

    def _memory(self, tokens: Tensor) -> KeysValues:
        """Keys and values of tokens that others attend to in this block."""
        batch, count, width = tokens.shape
        weight, bias = self.queries_keys_values.weight[width:], self.queries_keys_values.bias[width:]
        joint = functional.linear(self.attention_norm(tokens), weight, bias)
        keys, values = joint.reshape(batch, count, 2, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        return keys, values

    def _attend(self, tokens: Tensor, mask: Tensor | None, memory: KeysValues | None) -> Tensor:
        batch, count, width = tokens.shape
        joint = self.queries_keys_values(tokens).reshape(batch, count, 3, self.heads, width // self.heads)
        queries, keys, values = joint.permute(2, 0, 3, 1, 4)
        if memory is not None:
            keys, values = (torch.cat(pair, dim=2) for pair in zip(memory, (keys, values), strict=True))
        attended = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        output: Tensor = self.attention_output(attended.transpose(1, 2).reshape(batch, count, width))
        return output


class Block(BlockLayers):
    """Tokens that attend to each other."""

    def forward(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        return self._transformed(tokens, mask)


class ExpertBlock(BlockLayers):
    """Tokens that attend to each other and to those of the observations."""

    def forward(self, tokens: Tensor, mask: Tensor | None, observed: Tensor | KeysValues) -> tuple[Tensor, KeysValues]:
        """And the keys and values of `observed`, which take its place in further calls.

        They are computed here and not in a method of their own: FSDP, gradient checkpointing and compilation see
        `forward` alone.
        """
        memory = self._memory(observed) if isinstance(observed, Tensor) else observed
        return self._transformed(tokens, mask, memory), memory


class TransformerPolicy(VisionPolicy):
    """Tokens of the observations, one learned query per action of the chunk, and transformer blocks."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__(spec)
        self.width = spec["width"]
        self._patch_size = spec["patch_size"]
        cameras, vectors = self.modalities.cameras, self.modalities.vectors
        self.cameras = nn.ModuleDict(
            {name: PatchTokens(image, spec["patch_size"], self.width) for name, image in cameras.items()}
        )
        self.vectors = nn.ModuleDict({name: VectorToken(size, self.width) for name, size in vectors.items()})
        self.words = WordTokens(spec["max_words"], self.width) if self.modalities.instruction else None
        self.queries = _embedding(self.chunk, self.width)
        self.blocks = nn.ModuleList(blocks(Block, spec))
        self.norm = nn.LayerNorm(self.width)

    @property
    def critic_size(self) -> int:
        return self.width

    @property
    def transformer_blocks(self) -> Sequence[nn.Module]:
        return list(self.blocks)

    @property
    def tokens_per_decision(self) -> int:
        words = 0 if self.words is None else self.words.position.shape[1]
        patches = sum(height * width // self._patch_size**2 for height, width in self.modalities.cameras.values())
        return words + patches + len(self.vectors) + self.chunk

    def observation_tokens(self, inputs: Inputs) -> Tensor:
        """[B, N, width]: words first."""
        tokens = [] if self.words is None else [self.words(inputs[INSTRUCTION])]
        tokens += [patches(inputs[name]) for name, patches in self.cameras.items()]
        normalised = self.normalised(inputs)
        tokens += [embed(normalised[name]) for name, embed in self.vectors.items()]
        return torch.cat(tokens, dim=1)

    def attention_mask(self, inputs: Inputs, count: int) -> Tensor | None:
        """Which of `count` tokens to attend to, [B, 1, 1, count]: all but padding; None where there are no words."""
        if self.words is None:
            return None
        words = inputs[INSTRUCTION] != PADDING
        return functional.pad(words, (0, count - words.shape[1]), value=True)[:, None, None]


class Vla(HeadPolicy, TransformerPolicy):
    family = FAMILY

    def __init__(self, **spec: Unpack[VlaSpec]) -> None:
        super().__init__(spec)
        self.head = HEADS[spec["head"]](self.action_dim)
        self.output = nn.Linear(self.width, self.action_dim * self.head.outputs_per_dim)
        nn.init.zeros_(self.output.weight)  # a fresh policy acts the demos' mean
        nn.init.zeros_(self.output.bias)

    @classmethod
    def from_config(cls, settings: config.Vla, shapes: Shapes, action_dim: int) -> Vla:
        return cls(**transformer_spec(settings, shapes, action_dim), head=settings.head)

    @property
    def compiled_modules(self) -> Sequence[nn.Module]:
        """The whole network: the convolutions and casts around the blocks take as long as the blocks."""
        return (self,)

    def encoder_parameters(self) -> Sequence[nn.Parameter]:
        acting = {id(parameter) for part in (self.output, self.head) for parameter in part.parameters()}
        return [parameter for parameter in self.parameters() if id(parameter) not in acting]

    def critic_view(self, encoded: Tensor) -> Tensor:
        return encoded.mean(1)

    def decode(self, encoded: Tensor) -> Tensor:
        outputs: Tensor = self.output(encoded)
        return outputs.reshape(-1, self.chunk, self.action_dim, self.head.outputs_per_dim)

    def encode(self, inputs: Inputs) -> Tensor:
        """The action queries after the last block, [B, C, width] in float32."""
        device = self.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            observed = self.observation_tokens(inputs)
            tokens = torch.cat([observed, self.queries.expand(len(observed), -1, -1)], dim=1)
            mask = self.attention_mask(inputs, tokens.shape[1])
            for block in self.blocks:
                tokens = block(tokens, mask)
            decoded: Tensor = self.norm(tokens[:, -self.chunk :])
        return decoded.float()


def transformer_spec(settings: config.Vla | config.Flow, shapes: Shapes, action_dim: int) -> TransformerSpec:
    """What a section of params.yaml and the shapes of all observations say about a transformer."""
    readable.seen_in_patches(settings, shapes)
    return TransformerSpec(
        **vision_spec(settings, shapes, action_dim),
        patch_size=settings.patch_size,
        width=settings.width,
        depth=settings.depth,
        heads=settings.heads,
    )


def blocks(kind: type[BlockLayers], spec: TransformerSpec) -> list[BlockLayers]:
    return [kind(spec["width"], spec["heads"], spec["depth"]) for _ in range(spec["depth"])]


def _embedding(count: int, width: int) -> nn.Parameter:
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(1, count, width), std=_INIT_STD))


def _prime_factors(number: int) -> list[int]:
    for factor in range(2, number + 1):
        if number % factor == 0:
            return [factor, *_prime_factors(number // factor)]
    return []
