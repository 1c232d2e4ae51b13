"""LoRA: low-rank changes of linear layers, trained while the layers themselves stay as they are.

y = W x + (alpha / rank) B A x, with A [rank, in] drawn from a Gaussian and B [out, rank] zero at first, so a fresh
adapter changes nothing. A and B are float32 whatever the dtype of W: Adam's steps are too small for bfloat16.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from nightshift.errors import ConfigError

if TYPE_CHECKING:
    from nightshift import config

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Of the names of modules in peft's files."""


class LoraSpec(TypedDict):
    rank: int
    alpha: float
    targets: list[str]
    """Names of linear layers: the last part of their paths in the network."""


class LoraLinear(nn.Module):
    """A linear layer under its own parameter names, and an adapter beside it."""

    def __init__(self, layer: nn.Linear, spec: LoraSpec) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight.requires_grad_(False), layer.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)
        self.scale = spec["alpha"] / spec["rank"]
        device = layer.weight.device
        drawn = torch.randn(spec["rank"], layer.in_features, device=device) / spec["rank"]
        self.lora_A = nn.Parameter(drawn)
        self.lora_B = nn.Parameter(torch.zeros(layer.out_features, spec["rank"], device=device))

    def forward(self, inputs: Tensor) -> Tensor:
        output = functional.linear(inputs, self.weight, self.bias)
        a, b = self.lora_A.to(inputs.dtype), self.lora_B.to(inputs.dtype)
        return output + self.scale * functional.linear(functional.linear(inputs, a), b)

    def merged(self) -> Tensor:
        """The weight of the one layer that computes the same, in the dtype of W."""
        change = self.scale * (self.lora_B @ self.lora_A)
        return (self.weight.float() + change).to(self.weight.dtype)

    @torch.no_grad()
    def merge(self) -> None:
        """The weight takes in the change, and the adapter is as a fresh one: the layer computes what it did."""
        self.weight = nn.Parameter(self.merged(), requires_grad=False)
        self.lora_B.zero_()


def lora_spec(settings: config.Lora | None) -> LoraSpec | None:
    if settings is None:
        return None
    return {"rank": settings.rank, "alpha": settings.alpha, "targets": list(settings.targets)}


def adapt(
    network: nn.Module,
    spec: LoraSpec,
    *,
    trained_whole: Sequence[nn.Module] = (),
    untrained: Sequence[nn.Module] = (),
) -> None:
    """Freeze `network`, and give an adapter to every linear layer that the targets name.

    Modules of it that are `trained_whole` are neither frozen nor adapted; those that are `untrained` are not adapted.
    """
    without = {part for module in (*trained_whole, *untrained) for part in module.modules()}
    linear = [(path, layer) for path, layer in network.named_modules() if isinstance(layer, nn.Linear)]
    layers = [(path, layer) for path, layer in linear if layer not in without]
    _require_targets(spec["targets"], {_last(path) for path, _ in layers})
    network.requires_grad_(False)
    for module in trained_whole:
        module.requires_grad_(True)
    for path, layer in layers:
        if _last(path) in spec["targets"]:
            network.set_submodule(path, LoraLinear(layer, spec))


def adapters(network: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """Every layer that has one, by its path."""
    for path, module in network.named_modules():
        if isinstance(module, LoraLinear):
            yield path, module


def save_adapter(network: nn.Module, spec: LoraSpec, folder: Path, published_name: Callable[[str], str]) -> None:
    """The two files that peft reads, into a folder that is being written; `published_name` turns the names of our
    tensors into those of the published model."""
    published = {published_name(f"{path}.weight").removesuffix(".weight"): layer for path, layer in adapters(network)}
    tensors = {
        f"{PREFIX}{path}.{name}.weight": getattr(layer, name).detach().cpu().contiguous()
        for path, layer in published.items()
        for name in ("lora_A", "lora_B")
    }
    save_file(tensors, folder / WEIGHTS)
    settings = {
        "peft_type": "LORA",
        "r": spec["rank"],
        "lora_alpha": spec["alpha"],
        "target_modules": sorted(set(map(_last, published))),
        "lora_dropout": 0.0,
        "bias": "none",
    }
    (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _require_targets(targets: Sequence[str], known: set[str]) -> None:
    unknown = [name for name in targets if name not in known]
    if unknown:
        raise ConfigError(
            f"policy.lora.targets has {', '.join(unknown)}, and no linear layer of that name can have an adapter",
            f"choose from {', '.join(sorted(known))}",
        )
