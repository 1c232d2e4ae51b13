"""OpenVLA-OFT: two vision towers, a projector and Llama, which decodes a whole chunk of actions in one pass.

Modules carry the names of the published checkpoints. What nothing reads is not built: the last block of each tower,
its final norm and its pooling, and all rows of the output layer but those of the 256 action tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from nightshift.policies.initialisation import initialise
from nightshift.policies.openvla_oft.llama import Llama, LlamaSpec
from nightshift.policies.openvla_oft.vit import TowerSpec, VisionTransformer
from nightshift.policies.published import PublishedNetwork

BOS, STOP, PAD = 1, 2, 32000
"""Token ids of Llama 2's vocabulary, and the first one after it, which OpenVLA added for padding."""
VOCABULARY = PAD + 64
"""Its size with the 64 tokens that OpenVLA added. OpenVLA counts action tokens from the end: in a vocabulary of another
size they are others."""
ACTION_TOKENS = 256
"""They are the last ones of Llama 2's vocabulary: ids 31744 to 31999."""
FIRST_ACTION_TOKEN = PAD - ACTION_TOKENS
TOWERS = ("featurizer", "fused_featurizer")
"""DINOv2 and SigLIP."""
LM_HEAD = "language_model.lm_head.weight"
PARTS = ("action_head", "proprio_projector")
"""Modules that OpenVLA-OFT adds to OpenVLA, and saves as files of their own."""
_TOWER_CHANNELS = 3

DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Attention = Literal["bidirectional", "causal", "prefix"]


class Sizes(TypedDict):
    image_size: int
    """Pixels of the square images that the towers take."""
    dinov2: TowerSpec
    siglip: TowerSpec
    llama: LlamaSpec


class NetworkSpec(Sizes):
    proprio: int
    """Size of the state vector; 0 = none."""
    action_head: Literal["tokens", "l1"]
    chunk: int
    action_dim: int
    attention: Attention
    stop_token: bool
    """Whether a stop token follows the places of the actions."""
    dtype: Literal["float32", "bfloat16"]
    """Of all weights but those of modules that are always trained."""


class VisionBackbone(nn.Module):
    """Images as features of their patches, those of both towers side by side.

    An image has six channels: three as DINOv2 takes them, then three as SigLIP does.
    """

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__()
        self.featurizer = VisionTransformer(spec["dinov2"], spec["image_size"])
        self.fused_featurizer = VisionTransformer(spec["siglip"], spec["image_size"])

    @property
    def width(self) -> int:
        return self.featurizer.width + self.fused_featurizer.width

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 6 n, H, W] of n images to [B, n N, width]."""
        batch, channels, *size = pixels.shape
        count = channels // (2 * _TOWER_CHANNELS)
        images = pixels.reshape(batch * count, 2 * _TOWER_CHANNELS, *size)
        first, second = images[:, :_TOWER_CHANNELS], images[:, _TOWER_CHANNELS:]
        features = torch.cat([self.featurizer(first), self.fused_featurizer(second)], dim=-1)
        return features.reshape(batch, count * features.shape[1], self.width)


class Projector(nn.Module):
    """Features of patches as tokens of the language model."""

    def __init__(self, vision_width: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(vision_width, 4 * vision_width)
        self.fc2 = nn.Linear(4 * vision_width, width)
        self.fc3 = nn.Linear(width, width)
        for layer in (self.fc1, self.fc2, self.fc3):
            initialise(layer)

    def forward(self, features: Tensor) -> Tensor:
        hidden = functional.gelu(self.fc2(functional.gelu(self.fc1(features))))
        tokens: Tensor = self.fc3(hidden)
        return tokens


class ProprioProjector(nn.Module):
    """A state vector [B, D] as one token [B, 1, width]."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(size, width)
        self.fc2 = nn.Linear(width, width)
        initialise(self.fc1)
        initialise(self.fc2)

    def forward(self, vectors: Tensor) -> Tensor:
        token: Tensor = self.fc2(functional.gelu(self.fc1(vectors)))
        return token[:, None]


class ActionTokens(nn.Module):
    """The rows of the output layer that are action tokens; computed in float32 whatever their dtype."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Linear(width, ACTION_TOKENS, bias=False).weight

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden.float(), self.weight.float())


class LanguageModel(nn.Module):
    def __init__(self, spec: LlamaSpec, *, decodes_tokens: bool) -> None:
        super().__init__()
        self.model = Llama(spec)
        if decodes_tokens:
            self.lm_head = ActionTokens(spec["width"])


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.Linear(width, width)
        initialise(layer)
        self.ffn = nn.Sequential(nn.LayerNorm(width), layer, nn.ReLU())

    def forward(self, features: Tensor) -> Tensor:
        change: Tensor = self.ffn(features)
        return features + change


class MlpResNet(nn.Module):
    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(inputs)
        self.fc1 = nn.Linear(inputs, width)
        self.mlp_resnet_blocks = nn.ModuleList([ResidualBlock(width) for _ in range(2)])
        self.layer_norm2 = nn.LayerNorm(width)
        self.fc2 = nn.Linear(width, outputs)
        initialise(self.fc1)
        initialise(self.fc2)

    def forward(self, features: Tensor) -> Tensor:
        features = functional.relu(self.fc1(self.layer_norm1(features)))
        for block in self.mlp_resnet_blocks:
            features = block(features)
        outputs: Tensor = self.fc2(self.layer_norm2(features))
        return outputs


class L1RegressionHead(nn.Module):
    """Normalised actions [B, C, A] from the hidden states of their places [B, C A, width]."""

    def __init__(self, width: int, chunk: int, action_dim: int) -> None:
        super().__init__()
        self._shape = (chunk, width * action_dim)
        self.model = MlpResNet(width * action_dim, width, action_dim)

    def forward(self, hidden: Tensor) -> Tensor:
        actions: Tensor = self.model(hidden.reshape(len(hidden), *self._shape))
        return actions


class OpenVlaOftNetwork(PublishedNetwork):
    """The sequence is BOS, patches, state vector, padding, prompt, a place per action dimension, stop token.

    Published code puts padding at the end (SimpleVLA-RL) or before the prompt (RLinf). Both are the same computation:
    padding is masked and takes no position. Before the prompt, the places of actions are where they are in every row.
    """

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__()
        self._spec = spec
        width = spec["llama"]["width"]
        tokens = spec["action_head"] == "tokens"
        self.vision_backbone = VisionBackbone(spec)
        self.projector = Projector(self.vision_backbone.width, width)
        self.language_model = LanguageModel(spec["llama"], decodes_tokens=tokens)
        if spec["proprio"]:
            self.proprio_projector = ProprioProjector(spec["proprio"], width)
        if not tokens:
            self.action_head = L1RegressionHead(width, spec["chunk"], spec["action_dim"])
        self.to(DTYPES[spec["dtype"]])
        for module in self.always_trained.values():
            module.float()

    @property
    def transformer_blocks(self) -> list[nn.Module]:
        vision = self.vision_backbone
        return [*vision.featurizer.blocks, *vision.fused_featurizer.blocks, *self.language_model.model.layers]

    @property
    def vision_encoder(self) -> VisionBackbone:
        return self.vision_backbone

    @property
    def always_trained(self) -> dict[str, nn.Module]:
        """Modules that a published language model comes without: they are trained also where it has adapters,
        and float32 beside a bfloat16 base."""
        return {name: getattr(self, name) for name in PARTS if hasattr(self, name)}

    @property
    def places(self) -> int:
        """Of actions: one per dimension of each action of the chunk."""
        return self._spec["chunk"] * self._spec["action_dim"]

    def tokens(self, *, patches: int, prompt: int) -> int:
        """Of a sequence with so many tokens of images and of the prompt, which is counted without BOS."""
        return 1 + patches + bool(self._spec["proprio"]) + prompt + self._tail

    def see(self, pixels: Tensor) -> Tensor:
        """Features [B, n N, vision width] of images, whose normalised pixels are [B, 6 n, H, W]."""
        features: Tensor = self.vision_backbone(pixels.to(self._dtype))
        return features

    def forward(self, features: Tensor, prompt: Tensor, proprio: Tensor | None = None) -> Tensor:
        """Hidden states [B, C A, width] that the actions are read from.

        `features` are those of `see`; `prompt` [B, L] has the ids of the prompt's tokens after BOS, with PAD on the
        left; `proprio` [B, D] is normalised.
        """
        prompt = _without_common_padding(prompt)
        tokens = self._embedded(features, prompt, proprio)
        real = functional.pad(prompt != PAD, (tokens.shape[1] - self._tail - prompt.shape[1], self._tail), value=True)
        padded = bool((~real).any())
        positions = real.cumsum(1) - 1 if padded else torch.arange(tokens.shape[1], device=tokens.device)[None]
        hidden: Tensor = self.language_model.model(tokens, positions, self._mask(real, padded))
        # As in every language model, the token before a place predicts what stands there.
        return hidden[:, -self._tail - 1 : -1 - self._spec["stop_token"]]

    def decode(self, hidden: Tensor) -> Tensor:
        """[B, C, A, P] in float32: logits of the action tokens, or the normalised action itself (P = 1)."""
        with torch.autocast(hidden.device.type, enabled=False):
            if self._spec["action_head"] == "l1":
                actions: Tensor = self.action_head(hidden.float())
                return actions[..., None]
            logits: Tensor = self.language_model.lm_head(hidden)
            return logits.reshape(len(hidden), self._spec["chunk"], self._spec["action_dim"], ACTION_TOKENS)

    @property
    def _tail(self) -> int:
        """Tokens after the prompt."""
        return self.places + self._spec["stop_token"]

    @property
    def _dtype(self) -> torch.dtype:
        return self.language_model.model.embed_tokens.weight.dtype

    def _embedded(self, features: Tensor, prompt: Tensor, proprio: Tensor | None) -> Tensor:
        embed = self.language_model.model.embed_tokens
        batch, width, dtype = len(prompt), embed.embedding_dim, self._dtype
        bos, stop = (embed(torch.full((batch, 1), token, device=prompt.device)) for token in (BOS, STOP))
        patches = self.projector(features.to(dtype))
        state = [] if proprio is None else [self.proprio_projector(proprio.float())]
        places = bos.new_zeros(batch, self.places, width)
        end = [stop] if self._spec["stop_token"] else []
        parts = [bos, patches, *state, embed(prompt), places, *end]
        return torch.cat([part.to(dtype) for part in parts], dim=1)

    def _mask(self, real: Tensor, padded: bool) -> Tensor | None:
        """None where all attend to all: attention is fastest without a mask."""
        keys = real[:, None, None] if padded else None
        if self._spec["attention"] == "bidirectional":
            return keys
        count = real.shape[1]
        seen = torch.ones(count, count, dtype=torch.bool, device=real.device)
        if self._spec["attention"] == "causal":
            seen = seen.tril()
        else:
            prefix = count - self._tail - 1
            seen[:prefix, prefix:] = False  # RIPT-VLA computes the keys and values of the prefix first
        return seen if keys is None else seen & keys


def _without_common_padding(prompt: Tensor) -> Tensor:
    """Columns that are padding in every row cost time and change nothing."""
    longest = int((prompt != PAD).sum(1).max()) if len(prompt) else 0
    return prompt[:, prompt.shape[1] - longest :]
