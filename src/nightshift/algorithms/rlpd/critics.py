"""An ensemble of Q-networks as one batched computation: the parameters of all networks are stacked in one tensor."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from nightshift import config

_NORM_EPS = 1e-6
"""As in Flax, which RLPD is written in."""
_ON_ARM = platform.machine() in ("aarch64", "arm64")


class _StackedProduct(torch.autograd.Function):
    """`torch.baddbmm` with a backward pass that is faster on the CPU, with the same results.

    The gradient of the values is a product with the transposed weights. For those torch on ARM leaves BLAS for oneDNN,
    which arranges them anew, network by network; a transposed copy of all of them costs less. Not measured elsewhere.
    """

    @staticmethod
    def forward(ctx: Any, bias: Tensor, values: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(values, weight)
        return torch.baddbmm(bias, values, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (gradient,), (values, weight) = gradients, ctx.saved_tensors
        for_bias, for_values, for_weight = ctx.needs_input_grad
        transposed = weight.transpose(1, 2)
        return (
            gradient.sum(1, keepdim=True) if for_bias else None,
            gradient @ (transposed.contiguous() if _ON_ARM and transposed.is_cpu else transposed)
            if for_values
            else None,
            values.transpose(1, 2) @ gradient if for_weight else None,
        )


class StackedLinear(nn.Module):
    """E linear layers side by side: [E, B, inputs] to [E, B, outputs]."""

    def __init__(self, count: int, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = math.sqrt(6 / (inputs + outputs))  # Xavier, as in RLPD
        self.weight = nn.Parameter(torch.empty(count, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(count, 1, outputs))

    def forward(self, values: Tensor, members: Tensor | None) -> Tensor:
        bias, weight = _chosen(self.bias, members), _chosen(self.weight, members)
        product: Tensor = _StackedProduct.apply(bias, values, weight)  # type: ignore[no-untyped-call]
        return product


class StackedLayerNorm(nn.Module):
    """E layer normalisations side by side, each with its own gain and shift."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(count, 1, size))
        self.shift = nn.Parameter(torch.zeros(count, 1, size))

    def forward(self, values: Tensor, members: Tensor | None) -> Tensor:
        normalised = functional.layer_norm(values, values.shape[-1:], eps=_NORM_EPS)
        return torch.addcmul(_chosen(self.shift, members), normalised, _chosen(self.gain, members))


class CriticEnsemble(nn.Module):
    """Q-values [E, B] of features [B, F] and flat actions [B, N]."""

    def __init__(self, input_size: int, settings: config.CriticEnsemble) -> None:
        """`input_size`: F + N."""
        super().__init__()
        count, sizes = settings.num_qs, [input_size, *settings.hidden]
        linears = [StackedLinear(count, a, b) for a, b in pairwise(sizes)]
        norms = [StackedLayerNorm(count, b) for b in sizes[1:]] if settings.layer_norm else []
        self.linears, self.norms = nn.ModuleList(linears), nn.ModuleList(norms)
        self.output = StackedLinear(count, sizes[-1], 1)
        self.count = count
        self._activate = {"tanh": torch.tanh_, "relu": torch.relu_}[settings.activation]

    def forward(self, features: Tensor, actions: Tensor, members: Tensor | None = None) -> Tensor:
        """`members` [K] are the networks to ask, all without it: [K, B]."""
        joint = torch.cat([features, actions], dim=-1)
        hidden = joint.expand(self.count if members is None else len(members), *joint.shape)
        for index, linear in enumerate(self.linears):
            hidden = linear(hidden, members)
            if len(self.norms):
                hidden = self.norms[index](hidden, members)
            hidden = self._activate(hidden)
        values: Tensor = self.output(hidden, members)
        return values.squeeze(-1)


@torch.no_grad()
def polyak_update(targets: Sequence[Tensor], sources: Sequence[Tensor], tau: float) -> None:
    """Move every target towards its source by the share `tau` of their distance."""
    if targets:
        torch._foreach_lerp_(list(targets), list(sources), tau)


def _chosen(stacked: Tensor, members: Tensor | None) -> Tensor:
    return stacked if members is None else stacked[members]
