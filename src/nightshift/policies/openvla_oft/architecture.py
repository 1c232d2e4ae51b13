"""Sizes of a published checkpoint, from the shapes of its tensors and its config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nightshift.errors import DataError
from nightshift.policies.checkpoint_files import Shape, require_multiple, shape_of
from nightshift.policies.openvla_oft.llama import LlamaSpec
from nightshift.policies.openvla_oft.network import TOWERS, VOCABULARY, Sizes
from nightshift.policies.openvla_oft.vit import PATCH, TowerSpec

Shapes = Mapping[str, Shape]
MODEL_TYPE = "openvla"
TIMM_IDS = ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"]
_TOWER_HEADS = 16
"""Of both. Shapes do not tell it."""
_LLAMA_DEFAULTS: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "hidden_act": "silu",
}
_LLAMA_HEADS = 32
_LLAMA = "language_model.model."
_DAMAGED = "copy config.json from the checkpoint that this one was trained from"
_OTHER = "this family loads OpenVLA-OFT and its variants; choose another policy.family or another checkpoint"


def check_config(config: Mapping[str, Any]) -> None:
    """DataError if config.json is that of another architecture."""
    wanted = {"model_type": MODEL_TYPE, "timm_model_ids": TIMM_IDS}
    text = config.get("text_config") or {}
    heads = text.get("num_attention_heads", _LLAMA_HEADS)
    found = {"model_type": config.get("model_type"), "timm_model_ids": config.get("timm_model_ids", TIMM_IDS)}
    for name, default in {**_LLAMA_DEFAULTS, "num_key_value_heads": heads}.items():
        wanted[f"text_config.{name}"], found[f"text_config.{name}"] = default, text.get(name, default)
    for name, value in wanted.items():
        if found[name] != value:
            raise DataError(
                f"{name} is {found[name]!r} in the checkpoint's config.json, and {value!r} is expected", _OTHER
            )


def sizes(shapes: Shapes, config: Mapping[str, Any]) -> Sizes:
    """DataError where a tensor that tells one is missing or of another rank, or heads do not divide a width."""
    dinov2, siglip = (_tower(shapes, name) for name in TOWERS)
    patches = shape_of(shapes, f"vision_backbone.{TOWERS[0]}.pos_embed", 3, _OTHER)[1]
    return {
        "image_size": PATCH * math.isqrt(patches),
        "dinov2": dinov2,
        "siglip": siglip,
        "llama": _llama(shapes, config),
    }


def _tower(shapes: Shapes, name: str) -> TowerSpec:
    prefix = f"vision_backbone.{name}."
    telling, registers = f"{prefix}blocks.0.mlp.fc1.weight", f"{prefix}reg_token"
    mlp, width = shape_of(shapes, telling, 2, _OTHER)
    require_multiple(width, _TOWER_HEADS, telling, f"the tower has {_TOWER_HEADS} heads", _OTHER)
    return {
        "width": width,
        "mlp": mlp,
        "depth": blocks(shapes, name) - 1,
        "heads": _TOWER_HEADS,
        "registers": shape_of(shapes, registers, 3, _OTHER)[1] if registers in shapes else -1,
        "layer_scale": f"{prefix}blocks.0.ls1.scale_factor" in shapes,
    }


def blocks(shapes: Shapes, name: str) -> int:
    """Of a tower in a published file, with the last one, which nothing reads."""
    return _count(shapes, f"vision_backbone.{name}.blocks.")


def _llama(shapes: Shapes, config: Mapping[str, Any]) -> LlamaSpec:
    width = shape_of(shapes, f"{_LLAMA}embed_tokens.weight", 2, _OTHER)[1]
    return {
        "width": width,
        "mlp": shape_of(shapes, f"{_LLAMA}layers.0.mlp.gate_proj.weight", 2, _OTHER)[0],
        "depth": _count(shapes, f"{_LLAMA}layers."),
        "heads": _llama_heads(config, width),
        "vocabulary": VOCABULARY,
    }


def _llama_heads(config: Mapping[str, Any], width: int) -> int:
    heads = (config.get("text_config") or {}).get("num_attention_heads", _LLAMA_HEADS)
    if type(heads) is not int or heads < 1:
        raise DataError(
            f"text_config.num_attention_heads is {heads!r} in the checkpoint's config.json, and a whole number above 0 "
            "is expected",
            _DAMAGED,
        )
    why = f"config.json has {heads} heads (text_config.num_attention_heads), and positions turn pairs of numbers"
    require_multiple(width, 2 * heads, f"{_LLAMA}embed_tokens.weight", why, _DAMAGED)
    return heads


def _count(shapes: Shapes, prefix: str) -> int:
    """Of blocks or layers."""
    return len({name.removeprefix(prefix).split(".")[0] for name in shapes if name.startswith(prefix)})
