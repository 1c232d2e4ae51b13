"""JSON from which a policy of this family is built again."""

from __future__ import annotations

from typing import TypedDict

from nightshift.policies.openvla_oft.images import Preprocessing
from nightshift.policies.openvla_oft.network import NetworkSpec
from nightshift.policies.openvla_oft.norm_stats import BoundsSpec
from nightshift.policies.published import PublishedPolicySpec
from nightshift.policies.tokenizer import TokenizerSpec


class PixelsSpec(TypedDict):
    """Mean and std of the three channels of DINOv2, then of those of SigLIP."""

    mean: list[float]
    std: list[float]


class PublishedSpec(TypedDict):
    """What a checkpoint brings with it beside its weights."""

    tokenizer: TokenizerSpec
    actions: BoundsSpec
    proprio: BoundsSpec | None


class CommonSpec(PublishedPolicySpec):
    """With published weights and with random ones; at most one state vector."""

    network: NetworkSpec
    images: Preprocessing


class OpenVlaOftSpec(CommonSpec):
    pixels: PixelsSpec
    published: PublishedSpec | None
    """None = random weights: words are hashed, and the demos' statistics scale actions and state vectors."""
