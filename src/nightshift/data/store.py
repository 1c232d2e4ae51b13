"""A dataset on disk: two splits of episodes, their statistics, and a manifest of sha256 sums.

data/dataset/  train.safetensors, validation.safetensors   steps of all episodes, end to end
               index.json        every episode: split, length, provenance
               statistics.json   mean, std, min, max of every field over the training split
               manifest.json     sha256 of each file, written last
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import load as from_bytes
from safetensors.numpy import save as to_bytes

from nightshift import files
from nightshift.data.episode import Episode
from nightshift.types import Array

INDEX = "index.json"
STATISTICS = "statistics.json"
REMEDY = "run `dvc checkout` to restore it, or `nightshift run` to make it again"

Part = Literal["train", "validation"]


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Every step of a split, episodes end to end: N steps."""

    observations: Mapping[str, Array]  # each [N, D]
    actions: Array  # [N, A]


@dataclass(frozen=True, kw_only=True)
class Dataset:
    parts: Mapping[Part, Steps]
    statistics: Mapping[str, Mapping[str, Any]]
    """By field ("actions", "observations.proprio", ...): mean, std, min, max, each a list."""


def write(path: Path, parts: Mapping[Part, Sequence[Episode]]) -> None:
    with files.new_folder(path) as new:
        for part, episodes in parts.items():
            (new / f"{part}.safetensors").write_bytes(to_bytes(_columns(episodes)))
        files.write_json(new / STATISTICS, _statistics(_columns(parts["train"])))
        files.write_json(new / INDEX, {"episodes": [_entry(e, part) for part, es in parts.items() for e in es]})


def read(path: Path) -> Dataset:
    """The dataset, after checking every file against the manifest."""
    files.verify_folder(path, REMEDY)
    parts: tuple[Part, Part] = ("train", "validation")
    return Dataset(
        parts={part: _steps((path / f"{part}.safetensors").read_bytes()) for part in parts},
        statistics=json.loads((path / STATISTICS).read_text()),
    )


def describe(index: bytes) -> dict[str, Any]:
    """What a version holds, from its index.json: episodes and steps by task and split, sources, versions."""
    episodes = json.loads(index)["episodes"]
    tasks = Counter((e["provenance"]["task"], e["part"]) for e in episodes)
    steps = Counter[tuple[str, str]]()
    for e in episodes:
        steps[e["provenance"]["task"], e["part"]] += e["length"]
    return {
        "episodes": len(episodes),
        "steps": sum(steps.values()),
        "rows": [(task, part, count, steps[task, part]) for (task, part), count in sorted(tasks.items())],
        "sources": sorted({e["provenance"]["source"] for e in episodes}),
        "suites": sorted({e["provenance"]["suite"] for e in episodes}),
        "commits": sorted({e["provenance"]["commit"] for e in episodes}),
        "versions": sorted({f"{k} {v}" for e in episodes for k, v in e["provenance"]["versions"].items()}),
    }


def _columns(episodes: Sequence[Episode]) -> dict[str, Array]:
    names = episodes[0].observations
    columns = {f"observations.{name}": np.concatenate([e.observations[name] for e in episodes]) for name in names}
    return {**columns, "actions": np.concatenate([e.actions for e in episodes])}


def _steps(content: bytes) -> Steps:
    columns = from_bytes(content)
    actions = columns.pop("actions")
    return Steps(observations={k.removeprefix("observations."): v for k, v in columns.items()}, actions=actions)


def _statistics(columns: Mapping[str, Array]) -> dict[str, dict[str, list[float]]]:
    return {
        field: {
            "mean": values.mean(axis=0, dtype=np.float64).tolist(),
            "std": values.std(axis=0, dtype=np.float64).tolist(),
            "min": values.min(axis=0).tolist(),
            "max": values.max(axis=0).tolist(),
        }
        for field, values in columns.items()
    }


def _entry(episode: Episode, part: Part) -> dict[str, Any]:
    return {"part": part, "length": episode.length, "provenance": asdict(episode.provenance)}
