"""Published pi0 weights, in the layout of openpi's PyTorch models: safetensors in one file or in shards.

`Pi0Checkpoint.open` and `check` read headers alone, so that what does not fit is refused before memory is taken. `load`
then reads one tensor after the other: a model takes little more memory than its own weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nightshift.errors import DataError
from nightshift.policies.checkpoint_files import Shape, read_headers, read_tensor, require_multiple, shape_of
from nightshift.policies.pi0.gemma import GemmaSpec
from nightshift.policies.pi0.network import NetworkSpec, Pi0Network
from nightshift.policies.pi0.siglip import PATCH

_PALIGEMMA, _EXPERT = "paligemma_with_expert.paligemma.", "paligemma_with_expert.gemma_expert."
PUBLISHED_PREFIXES: Mapping[str, str] = {
    "vision_tower.": f"{_PALIGEMMA}model.vision_tower.vision_model.",
    "projector.": f"{_PALIGEMMA}model.multi_modal_projector.linear.",
    "language_model.": f"{_PALIGEMMA}model.language_model.",
    "expert.": f"{_EXPERT}model.",
}
"""Our names begin otherwise; those of the projections of states, actions and times are the published ones."""
_EMBEDDING, _TIED = f"{_PALIGEMMA}model.language_model.embed_tokens.weight", f"{_PALIGEMMA}lm_head.weight"
"""One tensor, which some files have under its first name, some under its second, and some under both."""
_UNUSED = (_TIED, f"{_EXPERT}lm_head.", f"{_EXPERT}model.embed_tokens.", f"{_PALIGEMMA}model.language_model.norm.")
"""pi0 writes no words, so nothing reads them."""
_SIGLIP_HEADS = 16
"""Of So400m: no tensor's shape shows them. Gemma has one head of keys and values, and shows its others."""
_OTHER = "this family loads pi0 and pi0.5; choose another policy.family or another checkpoint"
_PI05 = "time_mlp_in.weight"
"""Which pi0.5 has, and pi0 has not."""


@dataclass(frozen=True)
class Pi0Checkpoint:
    folder: Path
    shapes: Mapping[str, Shape]
    """Of all tensors, by their published names."""
    files: Mapping[str, Path]

    @classmethod
    def open(cls, folder: Path) -> Pi0Checkpoint:
        shapes, files = read_headers(folder)
        if _EMBEDDING not in shapes and _TIED in shapes:
            shapes[_EMBEDDING] = shapes[_TIED]
        return cls(folder, shapes, files)

    def network_spec(self, horizon: int) -> NetworkSpec:
        """Sizes by the shapes of tensors; of the number of actions per chunk the file says nothing."""
        adaptive = _PI05 in self.shapes
        ours = {name: self._matrix(published_name(name)) for name in _TELLING}
        patches, width = ours[_POSITIONS]
        head_width = ours[_KEYS][0]
        _require_heads(width, head_width)
        siglip_layer, expert_layer, gemma_layer = (
            published_name(name) for name in ("vision_tower.encoder.", "expert.", "language_model.")
        )
        return {
            "image_size": math.isqrt(patches) * PATCH,
            "siglip": {
                "width": width,
                "mlp": self._matrix(f"{siglip_layer}layers.0.mlp.fc1.weight")[0],
                "depth": self._layers(siglip_layer),
                "heads": _SIGLIP_HEADS,
            },
            "gemma": self._gemma(gemma_layer),
            "expert": self._gemma(expert_layer),
            "attention": {
                "heads": ours[_QUERIES][0] // head_width,
                "key_value_heads": 1,
                "head_width": head_width,
            },
            "depth": self._layers(expert_layer),
            "vocabulary": ours[_WORDS][0],
            "state_dim": 0 if adaptive else self._matrix(_STATE)[1],
            "action_dim": ours[_ACTION][1],
            "horizon": horizon,
            "adaptive_norms": adaptive,
        }

    def check(self, network: Pi0Network) -> None:
        """DataError: a tensor is missing, has another shape, or belongs to another architecture."""
        expected = {published_name(name): tuple(tensor.shape) for name, tensor in network.state_dict().items()}
        for name, shape in expected.items():
            if self._shape(name) != shape:
                raise DataError(
                    f"{name} has shape {list(self.shapes[name])} in {self.folder}, and {list(shape)} is expected",
                    _OTHER,
                )
        last = f"{PUBLISHED_PREFIXES['language_model.']}layers.{network.depth - 1}."
        strange = [name for name in self.shapes if name not in expected and not name.startswith((*_UNUSED, last))]
        if strange:
            more = f", and {len(strange) - 1} more" if len(strange) > 1 else ""
            raise DataError(f"the checkpoint {self.folder} has {strange[0]}, which pi0 does not have{more}", _OTHER)

    def load(self, network: Pi0Network, dtype: torch.dtype) -> None:
        """Give a network on the meta device its weights."""
        for name in network.state_dict():
            source = published_name(name)
            source = source if source in self.files else _TIED
            weight = read_tensor(self.files[source], source).to(dtype, copy=True)
            network.load_state_dict({name: weight}, strict=False, assign=True)

    def replaced(self, network: Pi0Network) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the files, one by one: that of the network where it has one."""
        own = {published_name(name): tensor for name, tensor in network.state_dict().items()}
        for name, path in self.files.items():
            if name == _TIED:
                yield name, own[_EMBEDDING].clone()  # files may have both, and safetensors takes no tensor twice
            else:
                yield name, own[name] if name in own else read_tensor(path, name)

    def _shape(self, name: str) -> Shape:
        if name not in self.shapes:
            raise DataError(f"the checkpoint {self.folder} has no {name}", _OTHER)
        return self.shapes[name]

    def _matrix(self, name: str) -> Shape:
        return shape_of(self.shapes, name, 2, _OTHER)

    def _gemma(self, prefix: str) -> GemmaSpec:
        hidden, width = self._matrix(f"{prefix}layers.0.mlp.gate_proj.weight")
        return {"width": width, "mlp": hidden}

    def _layers(self, prefix: str) -> int:
        numbers = [re.match(rf"{re.escape(prefix)}layers\.(\d+)\.", name) for name in self.shapes]
        return 1 + max((int(found[1]) for found in numbers if found), default=-1)


def _require_heads(siglip_width: int, head_width: int) -> None:
    heads = f"the tower has {_SIGLIP_HEADS} heads"
    require_multiple(siglip_width, _SIGLIP_HEADS, published_name(_POSITIONS), heads, _OTHER)
    require_multiple(head_width, 2, published_name(_KEYS), "positions turn pairs of numbers", _OTHER)


def published_name(name: str) -> str:
    for ours, theirs in PUBLISHED_PREFIXES.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


_POSITIONS = "vision_tower.embeddings.position_embedding.weight"
_WORDS = "language_model.embed_tokens.weight"
_QUERIES, _KEYS = (f"expert.layers.0.self_attn.{part}_proj.weight" for part in "qk")
_STATE, _ACTION = "state_proj.weight", "action_in_proj.weight"
_TELLING = (_POSITIONS, _WORDS, _QUERIES, _KEYS, _ACTION)
"""Tensors whose shapes say how large the network is."""
