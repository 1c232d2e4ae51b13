"""Random changes of camera images in behaviour cloning.

Every image has its own draws, which come from the CPU; arithmetic runs where the images are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache

import torch
from torch import Tensor

_LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in grey (ITU-R BT.601)."""


DRAWS = 5
"""Per image: two for the shift, three for the colours."""


def augment(images: Tensor, crop: int, jitter: float, draws: Tensor) -> Tensor:
    """Images uint8 [B, H, W, 3], shifted and with other colours, by uniform `draws` [B, DRAWS]."""
    if crop:
        images = shift(images, (draws[:, :2].T * (2 * crop + 1)).long() - crop)
    if jitter:
        images = recolour(images, 1 + jitter * (2 * draws[:, 2:].T - 1))
    return images


def augment_cameras(
    inputs: Mapping[str, Tensor], cameras: Collection[str], draws: Tensor, *, crop: int, jitter: float
) -> dict[str, Tensor]:
    """The inputs of a policy with augmented images; `draws` [B, DRAWS · cameras] has one camera after another."""
    by_camera = zip(cameras, draws.reshape(len(draws), len(cameras), DRAWS).unbind(1), strict=True)
    crops = crops_by_camera({name: inputs[name] for name in cameras}, crop)
    return {**inputs, **{name: augment(inputs[name], crops[name], jitter, own) for name, own in by_camera}}


def crops_by_camera(images: Mapping[str, Tensor], crop: int) -> dict[str, int]:
    """`crop` is in pixels of the largest images; smaller ones are shifted by the same share of theirs."""
    largest = max((shown.shape[1] for shown in images.values()), default=1)
    return {camera: round(crop * shown.shape[1] / largest) for camera, shown in images.items()}


def shift(images: Tensor, by: Tensor) -> Tensor:
    """Image i moved up by by[0, i] pixels and left by by[1, i]; its border is repeated where nothing is left."""
    batch, height, width, _ = images.shape
    down, right = by.to(images.device, non_blocking=True)
    rows = (torch.arange(height, device=images.device) + down[:, None]).clamp(0, height - 1)
    columns = (torch.arange(width, device=images.device) + right[:, None]).clamp(0, width - 1)
    return images[torch.arange(batch, device=images.device)[:, None, None], rows[:, :, None], columns[:, None, :]]


@cache
def _luma(device: torch.device) -> Tensor:
    """Copied once: a CUDA graph must not record a copy from the host."""
    return torch.tensor(_LUMA, device=device)


def recolour(images: Tensor, factors: Tensor) -> Tensor:
    """Image i with its brightness, contrast and saturation scaled by factors[0, i], factors[1, i] and factors[2, i]."""
    brightness, contrast, saturation = factors.to(images.device, non_blocking=True)[..., None, None, None]
    pixels = images * brightness
    grey = pixels @ _luma(images.device)
    mean = grey.mean((1, 2))[:, None, None, None]
    # Saturation scales the distance from the pixel's grey, contrast that from the image's mean grey.
    coloured = grey[..., None] + saturation * (pixels - grey[..., None])
    recoloured: Tensor = mean + contrast * (coloured - mean)
    return recoloured.round_().clamp_(0, 255).to(torch.uint8)
