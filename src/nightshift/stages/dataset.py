"""Make the dataset: check every demo, split by init state, compute statistics, write it with its sums."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nightshift import config
from nightshift.data import dataset_store, rate, sources
from nightshift.data.episode import Episode, columns, digest
from nightshift.data.episode_store import EpisodeStore
from nightshift.data.schema import Schema, common
from nightshift.errors import DataError
from nightshift.pipeline.job import Job
from nightshift.project import paths
from nightshift.telemetry.console import console

_FEWEST_STARTS = 2
"""Of a task: init states or, in imports, episodes."""

_WITHOUT_IT = "collect or import its source again without it, or leave the source out of dataset.sources in params.yaml"


_Rates = Mapping[str, Set[float | None]]
"""By source: the numbers of steps per second that its episodes have; None for those that do not say."""


class _Demo(NamedTuple):
    source: str
    path: Path
    episode: Episode


def run(job: Job, *, seed: int, dataset: config.Dataset) -> None:
    demos, schema = _checked_demos(sources.resolved(dataset.sources))
    rates = _rates(demos)
    _check_rates(rates)
    _tell_assumed_rate(rates)
    parts = _split(_without_repeats(demos), seed, dataset.validation_share)
    dataset_store.write(paths.DATASET, parts, schema)
    job.tracker.log({f"dataset/{part}_episodes": len(episodes) for part, episodes in parts.items()}, step=0)


def _checked_demos(names: Sequence[str]) -> tuple[list[_Demo], Schema]:
    """Every episode of every source, with the fields that all sources have."""
    stores = {name: sources.open_store(name) for name in names}
    schemas = {name: _schema(store, name) for name, store in stores.items()}
    schema = common(list(schemas.values()))
    _tell_left_out(schemas, schema)
    demos = []
    for name, store in stores.items():
        for key in store.keys():  # noqa: SIM118 - a store is no dict
            path, demo = store.path(key), store.get(key)
            if schemas[name] != schema:
                schemas[name].check(demo, str(path))
                demo = schema.conformed(demo)
            schema.check(demo, str(path))
            _check_demo(demo, path)
            demos.append(_Demo(name, path, demo))
    return demos, schema


def _schema(store: EpisodeStore, name: str) -> Schema:
    if store.schema is None:
        raise DataError(f"{store.folder} has no episodes", sources.remedy(name))
    return store.schema


def _tell_left_out(schemas: Mapping[str, Schema], schema: Schema) -> None:
    for name, own in schemas.items():
        if left_out := sorted(own.fields.keys() - schema.fields.keys()):
            words = f"of {name}, {', '.join(left_out)} are left out of the dataset: another source has no such field"
            console.print(words, markup=False, soft_wrap=True)


def _rates(demos: Sequence[_Demo]) -> _Rates:
    rates: defaultdict[str, set[float | None]] = defaultdict(set)
    for demo in demos:
        rates[demo.source].add(rate.known(demo.episode))
    return rates


def _check_rates(rates: _Rates) -> None:
    """A policy acts at one rate. Where a source does not say its own, nothing can be compared."""
    if len(_known(rates)) > 1:
        raise DataError(
            f"the sources of the dataset have different numbers of steps per second: {_in_words(rates)}",
            "leave all but those of one rate out of dataset.sources in params.yaml, or resample the others",
        )


def _tell_assumed_rate(rates: _Rates) -> None:
    silent = [name for name, own in rates.items() if None in own]
    if silent and _known(rates) - {rate.USUAL}:
        of_silent = f"of {', '.join(silent)} no number is known, and it is taken for the same"
        console.print(f"{_in_words(rates)} steps per second; {of_silent}", markup=False, soft_wrap=True)


def _known(rates: _Rates) -> set[float]:
    return {each for own in rates.values() for each in own if each is not None}


def _in_words(rates: _Rates) -> str:
    said = {name: sorted(_known({name: own})) for name, own in rates.items()}
    return ", ".join(f"{name} has {' and '.join(f'{each:g}' for each in own)}" for name, own in said.items() if own)


def _without_repeats(demos: Sequence[_Demo]) -> list[_Demo]:
    """An import may come twice, under two names: one copy would be trained on, the other one validate."""
    kept: list[_Demo] = []
    imported: dict[str, _Demo] = {}
    for demo in demos:
        is_import = demo.episode.provenance.init_state is None
        first = imported.setdefault(digest(demo.episode), demo) if is_import else demo
        if first is demo:
            kept.append(demo)
        else:
            console.print(f"{demo.path} is left out: it is the episode {first.path}", markup=False, soft_wrap=True)
    return kept


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
    if demo.length == 1:
        raise DataError(f"{path}: the episode has no action (episode: {demo.label})", _WITHOUT_IT)
    for name, column in columns(demo).items():
        if column.dtype == np.float64 and column.ndim > 1 and (np.abs(column) > np.finfo(np.float32).max).any():
            raise DataError(f"{path}: {name} is larger than float32 can be (episode: {demo.label})", _WITHOUT_IT)


def _split(
    demos: Sequence[_Demo], seed: int, validation_share: float
) -> Mapping[dataset_store.DatasetSplit, list[Episode]]:
    """Hold back whole init states, task by task, so that no state is on both sides; each side has at least one, unless
    nothing is to be held back."""
    if not validation_share:
        return {"train": [demo.episode for demo in demos], "validation": []}
    validation: set[tuple[str, tuple[int, str]]] = set()
    for task in sorted({demo.episode.provenance.task for demo in demos}):
        states = sorted({_start(demo) for demo in demos if demo.episode.provenance.task == task})
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
        held = (demo.episode.provenance.task, _start(demo)) in validation
        parts["validation" if held else "train"].append(demo.episode)
    return parts


def _start(demo: _Demo) -> tuple[int, str]:
    """Where it began: an init state of ours, or, for an import, the episode itself. Files of two imports may have the
    same name."""
    origin = demo.episode.provenance
    return (-1, f"{demo.source}/{origin.origin}") if origin.init_state is None else (origin.init_state, "")
