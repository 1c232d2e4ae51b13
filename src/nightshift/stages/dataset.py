"""Make the dataset: check every demo, split by init state, compute statistics, write it with its sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from nightshift import config, files, paths
from nightshift.data import episode, store
from nightshift.data.episode import Episode
from nightshift.job import Job


def run(job: Job, *, seed: int, dataset: config.Dataset) -> None:
    parts = _split(_checked_demos(), seed, dataset.validation_share)
    store.write(paths.DATASET, parts)
    job.tracker.log({f"dataset/{part}_episodes": len(episodes) for part, episodes in parts.items()}, step=0)


def _checked_demos() -> list[Episode]:
    names = files.verify_folder(paths.DEMOS, episode.REMEDY)
    demos = {paths.DEMOS / name: episode.load(paths.DEMOS / name) for name in sorted(names)}
    first = next(iter(demos.values()))
    sizes = {name: array.shape[-1] for name, array in first.observations.items()}
    for path, demo in demos.items():
        episode.validate(demo, path, sizes)
    return list(demos.values())


def _split(demos: Sequence[Episode], seed: int, validation_share: float) -> Mapping[store.Part, list[Episode]]:
    """Hold back whole init states, task by task, so that no state is on both sides; each side has at least one."""
    validation: set[tuple[str, int]] = set()
    for task in sorted({demo.provenance.task for demo in demos}):
        states = sorted({demo.provenance.init_state for demo in demos if demo.provenance.task == task})
        count = min(max(1, round(validation_share * len(states))), len(states) - 1)
        chosen = np.random.default_rng([seed, len(validation)]).choice(states, size=count, replace=False)
        validation |= {(task, int(state)) for state in chosen}
    parts: dict[store.Part, list[Episode]] = {"train": [], "validation": []}
    for demo in demos:
        held = (demo.provenance.task, demo.provenance.init_state) in validation
        parts["validation" if held else "train"].append(demo)
    return parts
