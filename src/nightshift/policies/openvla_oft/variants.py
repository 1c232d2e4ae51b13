"""What published checkpoints of one architecture differ in: it is a property of the weights, not a choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from nightshift.policies.openvla_oft.images import Preprocessing
from nightshift.policies.openvla_oft.network import Attention


class VariantSpec(TypedDict):
    attention: Attention
    stop_token: bool
    images: Preprocessing


PRESETS: Mapping[str, VariantSpec] = {
    "openvla-oft": {"attention": "bidirectional", "stop_token": True, "images": "jpeg_lanczos_crop"},
    "simplevla-rl": {"attention": "bidirectional", "stop_token": True, "images": "jpeg_lanczos_crop"},
    "rlinf": {"attention": "bidirectional", "stop_token": False, "images": "bicubic"},
    "ript-vla": {"attention": "prefix", "stop_token": True, "images": "jpeg_lanczos_crop"},
}
"""By the project that trained a checkpoint. RLinf's code is causal instead where it ran with unpatched transformers."""
