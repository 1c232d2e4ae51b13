"""Make the dataset: check every demo, split by init state, compute statistics, write it with its sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from nightshift import config
from nightshift.data import dataset_store, sources
from nightshift.data.episode import Episode
from nightshift.data.schema import Schema
from nightshift.errors import DataError
from nightshift.pipeline.job import Job
from nightshift.project import paths

_FEWEST_STARTS = 2
"""Of a task: init states or, in imports, episodes."""

_WITHOUT_IT = "collect or import its source again without it, or leave the source out of dataset.sources in params.yaml"


def run(job: Job, *, seed: int, dataset: config.Dataset) -> None:
    demos, schema = _checked_demos(sources.resolved(dataset.sources))
    parts = _split(demos, seed, dataset.validation_share)
    dataset_store.write(paths.DATASET, parts, schema)
    job.tracker.log({f"dataset/{part}_episodes": len(episodes) for part, episodes in parts.items()}, step=0)


def _checked_demos(names: Sequence[str]) -> tuple[list[Episode], Schema]:
    """Every episode of every source, all of one schema: the first source's."""
    stores = [sources.open_store(source) for source in names]
    schema = stores[0].schema
    if schema is None:
        raise DataError(f"{stores[0].folder} has no episodes", sources.remedy(names[0]))
    demos = []
    for store in stores:
        for key in store.keys():  # noqa: SIM118 - a store is no dict
            demo = store.get(key)
            schema.check(demo, str(store.path(key)))
            _check_demo(demo, store.path(key))
            demos.append(demo)
    return demos, schema


def _check_demo(demo: Episode, path: Path) -> None:
    if not demo.success:
        raise DataError(
            f"{path}: success is false: only successful episodes are demos (episode: {demo.label})",
            _WITHOUT_IT,
        )
    if demo.provenance.split != "train":
        raise DataError(
            f"{path}: provenance.split is {demo.provenance.split!r}: evaluation states are not for training "
            f"(episode: {demo.label})",
            _WITHOUT_IT,
        )


def _split(
    demos: Sequence[Episode], seed: int, validation_share: float
) -> Mapping[dataset_store.DatasetSplit, list[Episode]]:
    """Hold back whole init states, task by task, so that no state is on both sides; each side has at least one, unless
    nothing is to be held back."""
    if not validation_share:
        return {"train": list(demos), "validation": []}
    validation: set[tuple[str, tuple[int, str]]] = set()
    for task in sorted({demo.provenance.task for demo in demos}):
        states = sorted({_start(demo) for demo in demos if demo.provenance.task == task})
        if len(states) < _FEWEST_STARTS:
            raise DataError(
                f"the task {task} has demos of one start only; each task needs at least two, one to train on and one "
                "to validate with",
                f"collect or import more demos of {task}, leave its source out of dataset.sources, or set "
                "dataset.validation_share: 0, to train on all demos",
            )
        count = min(max(1, round(validation_share * len(states))), len(states) - 1)
        order = np.random.default_rng([seed, len(validation)]).choice(len(states), size=count, replace=False)
        validation |= {(task, states[index]) for index in order}
    parts: dict[dataset_store.DatasetSplit, list[Episode]] = {"train": [], "validation": []}
    for demo in demos:
        held = (demo.provenance.task, _start(demo)) in validation
        parts["validation" if held else "train"].append(demo)
    return parts


def _start(demo: Episode) -> tuple[int, str]:
    """Where it began: an init state of ours, or, for an import, the episode itself."""
    state = demo.provenance.init_state
    return (-1, demo.provenance.origin) if state is None else (state, "")
