"""LeRobot's normalisation statistics: per feature, for each episode and for the dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nightshift.data.tensors import Column

QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
_LEVELS = 256

Stats = Mapping[str, NDArray[Any]]


def of_column(column: Column) -> Stats:
    """Statistics of numbers [T, …], per dimension."""
    values = column.reshape(len(column), 1) if column.ndim == 1 else column
    return {
        "min": values.min(axis=0).astype(np.float64),
        "max": values.max(axis=0).astype(np.float64),
        "mean": values.mean(axis=0, dtype=np.float64),
        "std": values.std(axis=0, dtype=np.float64),
        "count": np.array([len(values)]),
        **{name: np.quantile(values.astype(np.float64), share, axis=0) for name, share in QUANTILES.items()},
    }


def of_images(frames: NDArray[np.uint8]) -> Stats:
    """Statistics of images [T, H, W, C], per channel and scaled to [0, 1], from histograms of the 256 levels."""
    counts = np.stack([np.bincount(frames[..., c].reshape(-1), minlength=_LEVELS) for c in range(frames.shape[-1])])
    levels = np.arange(_LEVELS) / (_LEVELS - 1)
    shares = counts / counts.sum(axis=1, keepdims=True)
    mean = shares @ levels
    reached = np.cumsum(shares, axis=1)
    found = {
        "min": levels[(counts > 0).argmax(axis=1)],
        "max": levels[_LEVELS - 1 - (counts[:, ::-1] > 0).argmax(axis=1)],
        "mean": mean,
        "std": np.sqrt(np.maximum(shares @ levels**2 - mean**2, 0)),
        **{name: levels[(reached >= share).argmax(axis=1)] for name, share in QUANTILES.items()},
    }
    return {**{name: value.reshape(-1, 1, 1) for name, value in found.items()}, "count": np.array([len(frames)])}


def aggregate(parts: Sequence[Stats]) -> Stats:
    """Aggregate the statistics of episodes, weighted by frames as in LeRobot; quantiles are approximate."""
    counts = np.array([float(part["count"][0]) for part in parts])
    weights = counts / counts.sum()

    def weighted(name: str) -> NDArray[Any]:
        return np.tensordot(weights, np.stack([part[name] for part in parts]), axes=1)

    mean = weighted("mean")
    spread = np.stack([part["std"] ** 2 + (part["mean"] - mean) ** 2 for part in parts])
    return {
        "min": np.stack([part["min"] for part in parts]).min(axis=0),
        "max": np.stack([part["max"] for part in parts]).max(axis=0),
        "mean": mean,
        "std": np.sqrt(np.tensordot(weights, spread, axes=1)),
        "count": np.array([int(counts.sum())]),
        **{name: weighted(name) for name in QUANTILES},
    }
