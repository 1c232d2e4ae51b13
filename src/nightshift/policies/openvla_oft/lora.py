"""LoRA adapters as peft saves them, merged into the weights that they were trained on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from nightshift.errors import DataError
from nightshift.policies.checkpoint_files import read_header, read_object
from nightshift.policies.lora import CONFIG, PREFIX, WEIGHTS

_NOT_PLAIN = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out")
"""Settings of peft that change how an adapter is merged."""
_NONE = "set policy.checkpoint.adapter to a folder that peft saved"
_DAMAGED = "download the adapter again"
_COPY_OF_BASE = ".base_layer.weight"
"""What peft saves of an adapted output layer beside its adapter: the weights that it was trained on."""


@dataclass(frozen=True)
class Adapter:
    path: Path
    scale: float
    shapes: Mapping[str, tuple[int, ...]]
    """Of its tensors, by the adapted module's name and lora_A or lora_B."""

    @classmethod
    def open(cls, folder: Path, weights: Mapping[str, tuple[int, ...]]) -> Adapter:
        """Read the headers of an adapter, and check that it fits `weights`, the shapes of a checkpoint."""
        settings = _settings(folder)
        shapes = _shapes(folder / WEIGHTS)
        for name in sorted({name.rpartition(".lora_")[0] for name in shapes}):
            _check(folder, name, settings["r"], shapes, weights)
        return cls(folder / WEIGHTS, settings["lora_alpha"] / settings["r"], shapes)

    def merged(self, name: str, weight: Tensor, rows: slice | None) -> Tensor:
        """A weight, of which `rows` were read (None = all), with what the adapter adds."""
        module = name.removesuffix(".weight")
        if f"{module}.lora_A" not in self.shapes:
            return weight
        with safe_open(self.path, "pt") as opened:
            a, b = (opened.get_tensor(f"{PREFIX}{module}.{part}.weight").float() for part in ("lora_A", "lora_B"))
        b = b if rows is None else b[rows]
        change: Tensor = self.scale * (b.flatten(1) @ a.flatten(1)).reshape(weight.shape)
        return weight.float() + change


def _settings(folder: Path) -> Mapping[str, Any]:
    path = folder / CONFIG
    if not path.exists():
        raise DataError(f"{folder} has no {CONFIG}", _NONE)
    settings = read_object(path, _DAMAGED)
    why = _not_plain(settings)
    if why is not None:
        raise DataError(
            f"{path} is not that of a plain LoRA adapter: {why}", "merge it with peft, and give the merged checkpoint"
        )
    return settings


def _not_plain(settings: Mapping[str, Any]) -> str | None:
    """Why an adapter cannot be merged here."""
    unusual = next((name for name in _NOT_PLAIN if settings.get(name)), None)
    if unusual is not None:
        return f"it has {unusual}"
    values: list[Any] = [settings.get(name) for name in ("peft_type", "r", "lora_alpha")]
    kind, rank, alpha = values
    if kind not in (None, "LORA"):
        return f"its peft_type is {kind}"
    if type(rank) is not int or rank < 1:
        return f"its r is {rank}, and has to be a whole number above 0"
    if type(alpha) not in (int, float) or not math.isfinite(alpha):
        return f"its lora_alpha is {alpha}, and has to be a number"
    return None


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    if not path.exists():
        raise DataError(f"the adapter {path} is missing", _NONE)
    found = read_header(path, _DAMAGED)
    adapted = {name: shape for name, shape in found.items() if not name.endswith(_COPY_OF_BASE)}
    strange = next((name for name in adapted if ".lora_" not in name), None)
    if strange is not None:
        raise DataError(
            f"{path} has {strange}, which is no part of a plain LoRA adapter",
            "merge it with peft, and give the merged checkpoint",
        )
    return {name.removeprefix(PREFIX).removesuffix(".weight"): shape for name, shape in adapted.items()}


def _check(
    folder: Path, module: str, rank: int, shapes: Mapping[str, tuple[int, ...]], weights: Mapping[str, tuple[int, ...]]
) -> None:
    weight = weights.get(f"{module}.weight")
    a, b = (shapes.get(f"{module}.{part}", ()) for part in ("lora_A", "lora_B"))
    if weight is None or a[1:] != weight[1:] or b[:1] != weight[:1] or a[:1] != b[1:2]:
        fits = "is not in the checkpoint" if weight is None else f"has shape {list(weight)}"
        raise DataError(
            f"the adapter {folder} adapts {module} by {list(a)} and {list(b)}, which {fits}",
            "give the adapter that was trained on this checkpoint",
        )
    if a[0] != rank:
        raise DataError(
            f"the adapter {folder} adapts {module} with rank {a[0]}, and its {CONFIG} has r {rank}",
            "give the folder as peft saved it: the two files are of different adapters",
        )
