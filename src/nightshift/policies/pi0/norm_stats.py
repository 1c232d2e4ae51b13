"""Statistics of the data that a checkpoint was trained on (openpi's norm_stats.json).

pi0 normalises by mean and std. pi0.5 scales what is between the quantiles q01 and q99 to [-1, 1]: that is the same with
the middle between them as mean, and half their distance as std.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, TypedDict

from nightshift.errors import DataError

_EPS = 1e-6


class MomentsSpec(TypedDict):
    mean: list[float]
    std: list[float]


def read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())["norm_stats"]
    except FileNotFoundError:
        raise DataError(
            f"there is no {path}", "set policy.checkpoint.norm_stats in params.yaml to the file in assets/"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} has no norm_stats: {error!r}", "take the file from the checkpoint's assets/") from None
    return found


def moments(
    statistics: dict[str, Any], field: Literal["state", "actions"], size: int, *, quantiles: bool
) -> MomentsSpec:
    """Of the first `size` dimensions: some files are padded to the network's."""
    keys = ("q01", "q99") if quantiles else ("mean", "std")
    try:
        first, second = ([float(value) for value in statistics[field][key]] for key in keys)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"the checkpoint's norm_stats have no numbers {keys[0]} and {keys[1]} of {field}: {error!r}",
            "take the file from the checkpoint's assets/",
        ) from None
    if min(len(first), len(second)) < size:
        raise DataError(
            f"the checkpoint's norm_stats of {field} have {len(first)} dimensions, and {size} are needed",
            "use a checkpoint that was made for this robot, or another state vector in policy.inputs",
        )
    if quantiles:
        halves = [(high - low + _EPS) / 2 for low, high in zip(first[:size], second[:size], strict=True)]
        return {"mean": [low + half for low, half in zip(first, halves, strict=False)], "std": halves}
    return {"mean": first[:size], "std": [value + _EPS for value in second[:size]]}
