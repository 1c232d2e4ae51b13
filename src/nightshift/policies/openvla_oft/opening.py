"""From the section `policy` of params.yaml to a policy's spec, and to the weights of a published checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nightshift.errors import ConfigError, DataError
from nightshift.policies.base import Shapes
from nightshift.policies.checkpoint_files import finite_numbers
from nightshift.policies.lora import lora_spec
from nightshift.policies.modalities import Modalities
from nightshift.policies.openvla_oft import architecture, norm_stats, tokenizer
from nightshift.policies.openvla_oft.checkpoint import PublishedCheckpoint, require_parts_used
from nightshift.policies.openvla_oft.jpeg import BLOCK
from nightshift.policies.openvla_oft.lora import Adapter
from nightshift.policies.openvla_oft.network import VOCABULARY, NetworkSpec, OpenVlaOftNetwork, Sizes
from nightshift.policies.openvla_oft.spec import CommonSpec, OpenVlaOftSpec, PixelsSpec, PublishedSpec
from nightshift.policies.openvla_oft.variants import PRESETS, VariantSpec
from nightshift.policies.openvla_oft.vit import PATCH, TowerSpec, TransformerSpec
from nightshift.policies.published import BaseSpec
from nightshift.policies.vision import AugmentationSpec
from nightshift.types import INSTRUCTION

if TYPE_CHECKING:
    from nightshift import config

_REGISTERS = 4
_PREPROCESSOR = "preprocessor_config.json"
_COPY = "copy the file from the checkpoint that this one was trained from"
_IMAGENET = PixelsSpec(mean=[0.485, 0.456, 0.406, 0.5, 0.5, 0.5], std=[0.229, 0.224, 0.225, 0.5, 0.5, 0.5])
"""And SigLIP's: for random weights. A checkpoint has its own, rounded to bfloat16."""


def random_spec(settings: config.OpenVlaOft, inputs: Shapes, action_dim: int) -> OpenVlaOftSpec:
    """With the sizes of params.yaml."""
    assert settings.size is not None
    _require_whole_patches(settings.size.image_size)
    common = _common(settings, inputs, _sizes(settings.size), action_dim)
    return OpenVlaOftSpec(**common, pixels=_IMAGENET, published=None)


def published(settings: config.OpenVlaOft, inputs: Shapes, action_dim: int) -> tuple[OpenVlaOftSpec, OpenVlaOftNetwork]:
    """The spec of a checkpoint and its network. All is checked before the first weight is read, and where tensors are
    on the meta device none is."""
    assert settings.checkpoint is not None
    folder = None if settings.checkpoint.adapter is None else Path(settings.checkpoint.adapter)
    checkpoint = PublishedCheckpoint.open(Path(settings.checkpoint.path), folder)
    config_json = {**checkpoint.json("config.json"), "text_config": checkpoint.field("config.json", "text_config")}
    architecture.check_config(config_json)
    common = _common(settings, inputs, architecture.sizes(checkpoint.shapes, config_json), action_dim)
    spec = OpenVlaOftSpec(
        **common,
        base=BaseSpec(path=settings.checkpoint.path, adapter=settings.checkpoint.adapter),
        pixels=_pixels(checkpoint),
        published=_brought_along(settings.checkpoint, checkpoint, common),
    )
    with torch.device("meta"):
        network = OpenVlaOftNetwork(spec["network"])
    require_parts_used([checkpoint.folder, *([] if folder is None else [folder])], network)
    checkpoint.check(network)
    adapter = None if folder is None else Adapter.open(folder, checkpoint.shapes)
    if torch.get_default_device().type != "meta":
        checkpoint.load(network, adapter)
    return spec, network


def published_files(base: BaseSpec, network: OpenVlaOftNetwork) -> tuple[PublishedCheckpoint, Adapter | None]:
    """The checkpoint that a network began with, and the adapter that was merged into it; DataError if it does not
    fit."""
    folder = None if base["adapter"] is None else Path(base["adapter"])
    checkpoint = PublishedCheckpoint.open(Path(base["path"]), folder)
    checkpoint.check(network)
    return checkpoint, None if folder is None else Adapter.open(folder, checkpoint.shapes)


def _common(settings: config.OpenVlaOft, inputs: Shapes, sizes: Sizes, action_dim: int) -> CommonSpec:
    variant = _variant(settings)
    modalities = _modalities(inputs, variant)
    network = NetworkSpec(
        **sizes,
        proprio=sum(modalities.vectors.values()),
        action_head=settings.head,
        chunk=settings.chunk,
        action_dim=action_dim,
        attention=variant["attention"],
        stop_token=variant["stop_token"],
        dtype=settings.dtype,
    )
    return CommonSpec(
        inputs=inputs,
        network=network,
        images=variant["images"],
        max_tokens=settings.max_tokens,
        lora=lora_spec(settings.lora),
        augmentation=AugmentationSpec(crop=settings.augmentation.crop, jitter=settings.augmentation.jitter),
        reuse_vision_features=settings.reuse_vision_features,
    )


def _variant(settings: config.OpenVlaOft) -> VariantSpec:
    chosen = settings.variant
    if isinstance(chosen, str):
        return PRESETS[chosen]
    return {"attention": chosen.attention, "stop_token": chosen.stop_token, "images": chosen.images}


def _modalities(inputs: Shapes, variant: VariantSpec) -> Modalities:
    """ConfigError if these observations are not those of an OpenVLA."""
    found = Modalities(inputs, 0)
    if not found.cameras or not found.instruction or len(found.vectors) > 1:
        raise ConfigError(
            f"policy.inputs is {', '.join(inputs)}, and openvla-oft takes one or more cameras, the {INSTRUCTION} and "
            "at most one state vector",
            "edit policy.inputs in params.yaml, e.g. [agentview, instruction]",
        )
    for name, size in found.cameras.items():
        if variant["images"] == "jpeg_lanczos_crop" and any(length % BLOCK for length in size):
            raise ConfigError(
                f"images of {name} have {size[0]} × {size[1]} pixels, and JPEG takes multiples of {BLOCK}",
                "change env.cameras.size in params.yaml",
            )
    return found


def _require_whole_patches(image_size: int) -> None:
    if image_size % PATCH:
        raise ConfigError(
            f"policy.size.image_size is {image_size}, which patches of {PATCH} pixels do not divide",
            f"change it to a multiple of {PATCH} in params.yaml",
        )


def _sizes(size: config.OpenVlaOftSize) -> Sizes:
    return {
        "image_size": size.image_size,
        "dinov2": _tower(size.dinov2, registers=_REGISTERS, layer_scale=True),
        "siglip": _tower(size.siglip, registers=-1, layer_scale=False),
        "llama": {**_transformer(size.llama), "vocabulary": VOCABULARY},
    }


def _tower(size: config.Transformer, *, registers: int, layer_scale: bool) -> TowerSpec:
    return {**_transformer(size), "registers": registers, "layer_scale": layer_scale}


def _transformer(size: config.Transformer) -> TransformerSpec:
    return {"width": size.width, "mlp": size.mlp, "depth": size.depth, "heads": size.heads}


def _pixels(checkpoint: PublishedCheckpoint) -> PixelsSpec:
    towers = checkpoint.json(_PREPROCESSOR).get("tvf_normalize_params") or []
    where = f"tvf_normalize_params in {checkpoint.folder / _PREPROCESSOR}"
    try:
        mean, std = (
            [value for tower in towers for value in finite_numbers(tower[key], f"{key} of {where}", _COPY)]
            for key in ("mean", "std")
        )
    except (KeyError, TypeError):
        mean, std = [], []
    if not len(mean) == len(std) == len(_IMAGENET["mean"]):
        raise DataError(
            f"{_PREPROCESSOR} of {checkpoint.folder} does not normalise the images of two towers "
            "(tvf_normalize_params: mean and std of three channels each)",
            _COPY,
        )
    if min(std) <= 0:
        raise DataError(f"std of {where} has {min(std)}, and has to be above 0", _COPY)
    return {"mean": mean, "std": std}


def _brought_along(
    settings: config.PublishedCheckpoint, checkpoint: PublishedCheckpoint, common: CommonSpec
) -> PublishedSpec:
    statistics = norm_stats.entry(checkpoint.norm_stats(), settings.unnorm_key)
    network = common["network"]
    proprio = network["proprio"]
    return {
        "tokenizer": tokenizer.read_llama(checkpoint.folder / "tokenizer.json"),
        "actions": norm_stats.bounds(statistics, "action", network["action_dim"], settings.range),
        "proprio": norm_stats.bounds(statistics, "proprio", proprio, settings.range) if proprio else None,
    }
