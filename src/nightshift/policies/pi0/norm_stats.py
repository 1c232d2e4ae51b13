"""Statistics of the data that a checkpoint was trained on (openpi's norm_stats.json).

pi0 normalises by mean and std. pi0.5 scales what is between the quantiles q01 and q99 to [-1, 1]: that is the same with
the middle between them as mean, and half their distance as std.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

from nightshift.errors import DataError
from nightshift.policies.checkpoint_files import as_object, finite_numbers, read_object

_EPS = 1e-6
_OTHER = "take the file from the checkpoint's assets/"


class MomentsSpec(TypedDict):
    mean: list[float]
    std: list[float]


@dataclass(frozen=True)
class NormStats:
    path: Path
    fields: Mapping[str, Any]

    def moments(self, field: Literal["state", "actions"], size: int, *, quantiles: bool) -> MomentsSpec:
        """Of the first `size` dimensions: some files are padded to the network's."""
        first, second = (self._numbers(field, key, size) for key in (("q01", "q99") if quantiles else ("mean", "std")))
        if quantiles:
            return self._between(field, first, second)
        self._refuse([value < 0 for value in second], f"std of {field}", "below 0")
        return {"mean": first, "std": [value + _EPS for value in second]}

    def _between(self, field: str, low: list[float], high: list[float]) -> MomentsSpec:
        pairs = list(zip(low, high, strict=True))
        self._refuse([below > above for below, above in pairs], f"q01 of {field}", "above q99")
        halves = [(above - below + _EPS) / 2 for below, above in pairs]
        return {"mean": [below + half for below, half in zip(low, halves, strict=True)], "std": halves}

    def _numbers(self, field: str, key: str, size: int) -> list[float]:
        if field not in self.fields:
            raise DataError(f"{self.path} has no {field}", _OTHER)
        found = as_object(self.fields[field], f"{field} in {self.path}", _OTHER)
        if key not in found:
            raise DataError(f"{self.path} has no {key} of {field}", _OTHER)
        numbers = finite_numbers(found[key], f"{key} of {field} in {self.path}", _OTHER)
        if len(numbers) < size:
            raise DataError(
                f"{key} of {field} in {self.path} has {len(numbers)} dimensions, and {size} are needed",
                "use a checkpoint that was made for this robot, or another state vector in policy.inputs",
            )
        return numbers[:size]

    def _refuse(self, wrong: list[bool], name: str, how: str) -> None:
        dimensions = [str(dimension) for dimension, found in enumerate(wrong) if found]
        if dimensions:
            raise DataError(f"{name} in {self.path} is {how} in dimension {', '.join(dimensions)}", _OTHER)


def read(path: Path) -> NormStats:
    if not path.exists():
        raise DataError(f"there is no {path}", "set policy.checkpoint.norm_stats in params.yaml to the file in assets/")
    return NormStats(path, as_object(read_object(path, _OTHER).get("norm_stats"), f"norm_stats in {path}", _OTHER))
