"""Camera images as pi0 takes them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def resize_with_pad(images: Tensor, size: int) -> Tensor:
    """Images uint8 [B, H, W, 3] to [B, size, size, 3]: bilinear with antialiasing, and black where they are not square.
    Images of that size stay as they are."""
    height, width = images.shape[1:3]
    if (height, width) == (size, size):
        return images
    ratio = max(height, width) / size
    new = (max(1, int(height / ratio)), max(1, int(width / ratio)))  # rounded down, as openpi does
    resized = functional.interpolate(images.permute(0, 3, 1, 2).float(), new, mode="bilinear", antialias=True)
    top, left = (size - new[0]) // 2, (size - new[1]) // 2
    padded = functional.pad(
        resized.round().clamp(0, 255).to(torch.uint8), (left, size - new[1] - left, top, size - new[0] - top)
    )
    return padded.permute(0, 2, 3, 1).contiguous()
