"""From a camera's image to the pixels that a checkpoint was trained on, as TensorFlow computed them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from nightshift.policies.openvla_oft import jpeg

Preprocessing = Literal["jpeg_lanczos_crop", "bicubic"]
_LANCZOS_RADIUS = 3
_CROP_AREA = 0.9
"""Training crops this share of an image at random; acting takes the same share from the centre."""


def jpeg_lanczos_crop(images: Tensor, size: int) -> Tensor:
    """OpenVLA-OFT and SimpleVLA-RL: a JPEG round trip, lanczos3 to the tower's size, the centre crop."""
    return centre_crop(lanczos(jpeg.round_trip(images), size))


def bicubic(images: Tensor, size: int) -> Tensor:
    """RLinf: bicubic with antialiasing, and no crop. Images of that size stay as they are."""
    if images.shape[1:3] == (size, size):
        return images
    resized = functional.interpolate(
        images.permute(0, 3, 1, 2).float(), (size, size), mode="bicubic", antialias=True, align_corners=False
    )
    return _to_bytes(resized.permute(0, 2, 3, 1))


PREPROCESSING: Mapping[str, Callable[[Tensor, int], Tensor]] = {
    "jpeg_lanczos_crop": jpeg_lanczos_crop,
    "bicubic": bicubic,
}
"""By name: images uint8 [B, H, W, 3] and a size to images uint8 [B, size, size, 3]."""


def lanczos(images: Tensor, size: int) -> Tensor:
    """Resized with a Lanczos window of radius 3, widened by the factor of shrinking, as tf.image.resize does."""
    rows, columns = (_lanczos_weights(length, size).to(images.device) for length in images.shape[1:3])
    return _to_bytes(torch.einsum("yh,bhwc,xw->byxc", rows, images.float(), columns))


def centre_crop(images: Tensor) -> Tensor:
    """The middle of an image, resized to the whole, as tf.image.crop_and_resize does: corners of pixels are aligned."""
    rows, columns = (_crop_places(length).to(images.device) for length in images.shape[1:3])
    values = _interpolated(_interpolated(images.float() * (1 / 255), columns, 2), rows, 1)
    return (values.clamp(0, 1) * 255.5).to(torch.uint8)  # as tf.image.convert_image_dtype: rounded down


def _crop_places(length: int) -> Tensor:
    """Where pixels of the crop lie among those of the image."""
    side = torch.tensor(_CROP_AREA).sqrt()
    start = (1 - side) / 2
    return (start.double() * (length - 1) + torch.arange(length) * side.double()).float()


def _interpolated(values: Tensor, places: Tensor, axis: int) -> Tensor:
    """Linearly between neighbours along one axis. TensorFlow fuses the product and the sum: one rounding, not two."""
    before = places.floor().long()
    after = (before + 1).clamp(max=values.shape[axis] - 1)
    share = (places - before).reshape([-1 if dim == axis else 1 for dim in range(values.dim())])
    low, high = values.index_select(axis, before), values.index_select(axis, after)
    return torch.addcmul(low.double(), (high - low).double(), share.double()).float()


def _lanczos_weights(length: int, size: int) -> Tensor:
    """[size, length]."""
    scale = length / size
    centres = (torch.arange(size, dtype=torch.float32) + 0.5) * scale
    distances = (torch.arange(length) + 0.5 - centres[:, None]) / max(scale, 1)
    window = torch.sinc(distances) * torch.sinc(distances / _LANCZOS_RADIUS)
    weights = torch.where(distances.abs() < _LANCZOS_RADIUS, window, 0)
    return weights / weights.sum(1, keepdim=True)


def _to_bytes(values: Tensor) -> Tensor:
    return values.round().clamp(0, 255).to(torch.uint8)
