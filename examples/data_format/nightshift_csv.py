"""A format of its own: demos as CSV files, one per episode, with columns such as block.0, block.1, action.0, action.1.

A row is a control step: what was seen, and the action that followed. All episodes are successes.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nightshift.data import symlinks
from nightshift.data.episode import NO_POLICY, Episode, with_last
from nightshift.data.formats import REPEATED_FINAL, SUCCESS_ASSUMED, EpisodeRef
from nightshift.data.formats.common import episode_key, files_of, provenance, resolve_task
from nightshift.data.limits import DEFAULT, Limits
from nightshift.errors import DataError

ACTION = "action"
NUMBER_BYTES = 4


def list_episodes(path: Path, task: str, limits: Limits = DEFAULT) -> Sequence[EpisodeRef]:
    """The episodes of a file or folder; nothing is read before an episode is asked for."""
    name = resolve_task("", task, str(path))
    files = [symlinks.check(file, path) for file in files_of(path, [".csv"])]
    return [
        EpisodeRef(key=episode_key(place, file.stem), where=str(file), read=partial(_read, file, name, limits))
        for place, file in enumerate(files)
    ]


def _read(file: Path, task: str, limits: Limits) -> Episode:
    limits.check_episode(NUMBER_BYTES * file.stat().st_size, file.stat().st_size, str(file))
    with file.open(newline="") as stream:
        header, *rows = [*csv.reader(stream)] or [[]]
    if not rows:
        raise DataError(f"{file} has no row of numbers", "leave it out")
    columns = {name: np.array([float(row[place]) for row in rows], np.float32) for place, name in enumerate(header)}
    vectors = {name: _vector(columns, name) for name in dict.fromkeys(column.rpartition(".")[0] for column in header)}
    if ACTION not in vectors:
        raise DataError(f"{file} has no columns {ACTION}.0, {ACTION}.1, …", "write the actions into it")
    actions = with_last(vectors.pop(ACTION))
    rewards = np.zeros(len(actions), np.float32)
    rewards[-2] = 1
    return Episode(
        observations={name: with_last(values, values[-1]) for name, values in vectors.items()},
        actions=actions,
        rewards=rewards,
        discounts=np.ones(len(actions), np.float32),
        interventions=np.zeros(len(actions), np.bool_),
        policy_actions=actions,
        policy_versions=np.full(len(actions), NO_POLICY, np.int64),
        terminated=True,
        truncated=False,
        success=True,
        provenance=provenance(source="csv", path=file, location="0", task=task),
        metadata={REPEATED_FINAL: True, SUCCESS_ASSUMED: True},
    )


def _vector(columns: dict[str, NDArray[np.float32]], name: str) -> NDArray[np.float32]:
    """Columns name.0, name.1, … side by side: [N, D]."""
    return np.stack([values for column, values in columns.items() if column.rpartition(".")[0] == name], axis=1)
