"""What an image loses in a JPEG round trip, without the file: the integer arithmetic of libjpeg, for many images.

OpenVLA was trained on images that TensorFlow had written with quality 95 and halved chroma, and read with the fast
integer DCT. Other decoders differ from it by up to eleven levels. Entropy coding is left out: it loses nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCK = 16
"""Pixels in height and width that chroma is coded in; sizes of images must be multiples."""
_QUALITY = 95
_LUMA = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)
_CHROMA = (
    (17, 18, 24, 47, 99, 99, 99, 99),
    (18, 21, 26, 66, 99, 99, 99, 99),
    (24, 26, 56, 99, 99, 99, 99, 99),
    (47, 66, 99, 99, 99, 99, 99, 99),
    *[(99, 99, 99, 99, 99, 99, 99, 99)] * 4,
)
"""Quantisation of quality 50, from the standard's Annex K."""


def round_trip(images: Tensor) -> Tensor:
    """Images uint8 [B, H, W, 3] as they are after writing and reading a file."""
    luma, blue, red = _to_ycc(images.int().unbind(-1))
    decoded = [_coded(luma, _LUMA), *(_upsampled(_coded(_downsampled(c), _CHROMA)) for c in (blue, red))]
    return torch.stack(_to_rgb(*decoded), dim=-1).to(torch.uint8)


def _to_ycc(rgb: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    r, g, b = rgb
    half, centre = 1 << 15, 128 << 16
    return (
        (_fix(0.299) * r + _fix(0.587) * g + _fix(0.114) * b + half) >> 16,
        (-_fix(0.16874) * r - _fix(0.33126) * g + _fix(0.5) * b + centre + half - 1) >> 16,
        (_fix(0.5) * r - _fix(0.41869) * g - _fix(0.08131) * b + centre + half - 1) >> 16,
    )


def _to_rgb(luma: Tensor, blue: Tensor, red: Tensor) -> list[Tensor]:
    half, blue, red = 1 << 15, blue - 128, red - 128
    r = luma + ((_fix(1.402) * red + half) >> 16)
    g = luma + ((-_fix(0.34414) * blue - _fix(0.71414) * red + half) >> 16)
    b = luma + ((_fix(1.772) * blue + half) >> 16)
    return [channel.clamp(0, 255) for channel in (r, g, b)]


def _fix(factor: float) -> int:
    return int(factor * (1 << 16) + 0.5)


def _downsampled(plane: Tensor) -> Tensor:
    """Means of 2 × 2 pixels, rounded down and up in turn."""
    sums = plane[:, ::2] + plane[:, 1::2]
    sums = sums[:, :, ::2] + sums[:, :, 1::2]
    return (sums + 1 + torch.arange(sums.shape[2], device=sums.device) % 2) >> 2


def _upsampled(plane: Tensor) -> Tensor:
    """Triangle filter: three quarters of the nearer sample and one of the farther, in both directions."""
    above, below = (torch.cat(rows, 1) for rows in ((plane[:, :1], plane[:, :-1]), (plane[:, 1:], plane[:, -1:])))
    sums = torch.stack([3 * plane + above, 3 * plane + below], dim=2).flatten(1, 2)
    left, right = (torch.cat(c, 2) for c in ((sums[..., :1], sums[..., :-1]), (sums[..., 1:], sums[..., -1:])))
    return torch.stack([(3 * sums + left + 8) >> 4, (3 * sums + right + 7) >> 4], dim=3).flatten(2, 3)


def _coded(plane: Tensor, quality_50: tuple[tuple[int, ...], ...]) -> Tensor:
    """A plane [B, H, W] after quantisation of its 8 × 8 blocks."""
    table = torch.tensor(quality_50, dtype=torch.int32, device=plane.device)
    table = ((table * (200 - 2 * _QUALITY) + 50) // 100).clamp(1, 255)
    batch, height, width = plane.shape
    blocks = plane.reshape(batch, height // 8, 8, width // 8, 8).transpose(2, 3) - 128
    blocks = _inverse_dct(_quantised(_dct(blocks), table) * _dequantisers(table))
    return ((blocks >> 5) + 128).clamp(0, 255).transpose(2, 3).reshape(batch, height, width)


def _quantised(coefficients: Tensor, table: Tensor) -> Tensor:
    steps = 8 * table
    return coefficients.sign() * torch.div(coefficients.abs() + steps // 2, steps, rounding_mode="floor")


def _dequantisers(table: Tensor) -> Tensor:
    """Steps with the factors that the fast inverse DCT (Arai, Agui and Nakajima) leaves to them."""
    factors = [1.0] + [math.cos(k * math.pi / 16) * math.sqrt(2) for k in range(1, 8)]
    scale = [[int(a * b * (1 << 14) + 0.5) for b in factors] for a in factors]
    return (table * torch.tensor(scale, dtype=torch.int32, device=table.device) + (1 << 11)) >> 12


def _dct(blocks: Tensor) -> Tensor:
    """libjpeg's accurate integer DCT of the last two axes, eight times the orthonormal one."""
    rows = _dct_pass(blocks.unbind(-1), keep=2)
    columns = _dct_pass(torch.stack(rows, -1).unbind(-2), keep=-2)
    return torch.stack(columns, -2)


def _dct_pass(d: tuple[Tensor, ...], keep: int) -> list[Tensor]:
    """One axis; `keep` bits more of precision come out than went in."""
    sums, differences = [d[k] + d[7 - k] for k in range(4)], [d[k] - d[7 - k] for k in range(4)]
    outer, inner = (sums[0] + sums[3], sums[1] + sums[2])
    down = 13 - keep
    turned = (sums[1] - sums[2] + sums[0] - sums[3]) * 4433
    t7, t6, t5, t4 = differences
    z5 = (t4 + t6 + t5 + t7) * 9633
    z1, z2 = (t4 + t7) * -7373, (t5 + t6) * -20995
    z3, z4 = (t4 + t6) * -16069 + z5, (t5 + t7) * -3196 + z5
    return [
        _descaled((outer + inner) << 13, down),
        _descaled(t7 * 12299 + z1 + z4, down),
        _descaled(turned + (sums[0] - sums[3]) * 6270, down),
        _descaled(t6 * 25172 + z2 + z3, down),
        _descaled((outer - inner) << 13, down),
        _descaled(t5 * 16819 + z2 + z4, down),
        _descaled(turned - (sums[1] - sums[2]) * 15137, down),
        _descaled(t4 * 2446 + z1 + z3, down),
    ]


def _descaled(values: Tensor, bits: int) -> Tensor:
    return (values + (1 << (bits - 1))) >> bits


def _inverse_dct(blocks: Tensor) -> Tensor:
    """libjpeg's fast integer inverse DCT of the last two axes, 32 times the orthonormal one."""
    columns = _inverse_pass(blocks.unbind(-2))
    rows = _inverse_pass(torch.stack(columns, -2).unbind(-1))
    return torch.stack(rows, -1)


def _inverse_pass(d: tuple[Tensor, ...]) -> list[Tensor]:
    t10, t11, t13 = d[0] + d[4], d[0] - d[4], d[2] + d[6]
    t12 = ((d[2] - d[6]) * 362 >> 8) - t13
    even = [t10 + t13, t11 + t12, t11 - t12, t10 - t13]
    z13, z10, z11, z12 = d[5] + d[3], d[5] - d[3], d[1] + d[7], d[1] - d[7]
    z5 = (z10 + z12) * 473 >> 8
    t7 = z11 + z13
    t6 = (z10 * -669 >> 8) + z5 - t7
    t5 = ((z11 - z13) * 362 >> 8) - t6
    t4 = (z12 * 277 >> 8) - z5 + t5
    odd = [t7, t6, t5, -t4]
    return [e + o for e, o in zip(even, odd, strict=True)] + [e - o for e, o in zip(even[::-1], odd[::-1], strict=True)]
