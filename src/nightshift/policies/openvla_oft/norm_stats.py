"""Statistics of the data that a checkpoint was trained on, by which it scales actions and state vectors to [-1, 1]."""

from __future__ import annotations

from collections.abc import Mapping
from operator import eq, gt
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn

from nightshift.errors import ConfigError, DataError
from nightshift.policies.checkpoint_files import as_object, finite_numbers
from nightshift.policies.heads import MIN_STD

Range = Literal["q01_q99", "min_max"]
_KEYS: Mapping[str, tuple[str, str]] = {"q01_q99": ("q01", "q99"), "min_max": ("min", "max")}
_NO_NOOPS = "_no_noops"
"""OpenVLA's LIBERO datasets are named after the suite, with this suffix where idle steps were removed."""
_EPS = 1e-8
_FILES = "the checkpoint's statistics (dataset_statistics.json, or norm_stats in config.json)"
_DAMAGED = "copy the file from the checkpoint that this one was trained from"


class BoundsSpec(TypedDict):
    low: list[float]
    high: list[float]
    mask: list[bool]


class Bounds(nn.Module):
    """Scales between `low` and `high`, to [-1, 1], the dimensions where `mask` is true; the others pass through."""

    low: Tensor
    high: Tensor
    mask: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("low", -torch.ones(size))
        self.register_buffer("high", torch.ones(size))
        self.register_buffer("mask", torch.ones(size, dtype=torch.bool))

    def set(self, spec: BoundsSpec) -> None:
        self.low.copy_(torch.tensor(spec["low"]))
        self.high.copy_(torch.tensor(spec["high"]))
        self.mask.copy_(torch.tensor(spec["mask"]))

    def set_to_demos(self, statistics: Mapping[str, Any]) -> None:
        """Their minimum and maximum; a constant dimension keeps some width, so that values can be told apart."""
        low, high = torch.tensor(statistics["min"]), torch.tensor(statistics["max"])
        centre, half = (low + high) / 2, ((high - low) / 2).clamp(min=MIN_STD)
        self.set({"low": (centre - half).tolist(), "high": (centre + half).tolist(), "mask": [True] * len(low)})

    def scale(self, values: Tensor) -> Tensor:
        return torch.where(self.mask, 2 * (values - self.low) / (self.high - self.low + _EPS) - 1, values)

    def unscale(self, values: Tensor) -> Tensor:
        return torch.where(self.mask, 0.5 * (values + 1) * (self.high - self.low + _EPS) + self.low, values)


def entry(norm_stats: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The statistics of a dataset, by its name or by its name with the suffix for removed idle steps."""
    for candidate in (key, key + _NO_NOOPS):
        if candidate in norm_stats:
            return _fields(norm_stats[candidate], candidate)
    raise ConfigError(
        f"the checkpoint has no statistics of {key} nor of {key}{_NO_NOOPS}; it has those of {', '.join(norm_stats)}",
        "set policy.checkpoint.unnorm_key in params.yaml to one of them",
    )


def bounds(statistics: Mapping[str, Any], field: str, size: int, kind: Range) -> BoundsSpec:
    """Of `action` or `proprio` in the statistics of a dataset."""
    if field not in statistics:
        raise DataError(
            f"the checkpoint's statistics have no {field}; they have {', '.join(statistics)}",
            "choose another policy.checkpoint.unnorm_key, or policy.inputs without a state vector, in params.yaml",
        )
    low_key, high_key = _KEYS[kind]
    values = _fields(statistics[field], field)
    missing = [key for key in (low_key, high_key) if key not in values]
    if missing:
        raise DataError(
            f"the checkpoint's statistics of {field} have no {' and no '.join(missing)}; they have {', '.join(values)}",
            "change policy.checkpoint.range in params.yaml",
        )
    low, high = (_numbers(values[key], f"{key} of {field}") for key in (low_key, high_key))
    if not len(low) == len(high) == size:
        raise DataError(
            f"the checkpoint's statistics of {field} have {len(low)} dimensions, and the environment has {size}",
            "use a checkpoint that was made for this robot",
        )
    mask = [bool(value) for value in _numbers(values.get("mask", [True] * size), f"mask of {field}")]
    if len(mask) != size:
        raise DataError(f"mask of {field} in {_FILES} has {len(mask)} dimensions, and {low_key} has {size}", _DAMAGED)
    _require_range(field, (low_key, high_key), list(zip(low, high, mask, strict=True)))
    return {"low": low, "high": high, "mask": mask}


def _require_range(field: str, keys: tuple[str, str], dimensions: list[tuple[float, float, bool]]) -> None:
    turned, constant = (
        ", ".join(str(i) for i, (low, high, scaled) in enumerate(dimensions) if scaled and wrong(low, high))
        for wrong in (gt, eq)
    )
    if turned:
        raise DataError(f"{keys[0]} is above {keys[1]} in dimension {turned} of {field} in {_FILES}", _DAMAGED)
    if constant:
        raise DataError(
            f"{keys[0]} equals {keys[1]} in dimension {constant} of the checkpoint's statistics of {field}",
            "change policy.checkpoint.range in params.yaml",
        )


def _fields(found: Any, name: str) -> Mapping[str, Any]:
    return as_object(found, f"{name} in {_FILES}", _DAMAGED)


def _numbers(found: Any, name: str) -> list[float]:
    return finite_numbers(found, f"{name} in {_FILES}", _DAMAGED)
