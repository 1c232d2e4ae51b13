"""Labelled frames from episodes, and which of them are for training, calibration and testing.

A successful episode gives two segments: its last frame, which shows success, and the frames before it, which do not;
the `ambiguous_steps` between the two are left out. An episode that failed is one segment without success. A classifier
is judged by segments and not by frames: one wrong frame anywhere gives a wrong reward, and frames of one episode are so
alike that they are no independent evidence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from nightshift import config
from nightshift.data.episode import Episode
from nightshift.errors import DataError
from nightshift.policies.base import Shapes
from nightshift.types import INSTRUCTION, Observation

Part = Literal["train", "calibration", "test"]
PARTS: tuple[Part, ...] = get_args(Part)
_FEWEST = 3
"""Starts with a success, of every task: one for each part."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Frames of one episode with one label."""

    episode: Episode = field(repr=False)
    frames: range
    success: bool

    @property
    def task(self) -> str:
        return self.episode.provenance.task

    def observe(self, names: Sequence[str], frames: Sequence[int] | NDArray[np.int64]) -> Observation:
        """Observations [N, …] of some steps of the episode; `names` may contain the instruction."""
        seen = {name: self.episode.observations[name][frames] for name in names if name != INSTRUCTION}
        language = {INSTRUCTION: np.full(len(frames), self.episode.provenance.language)}
        return seen | {name: language[name] for name in names if name == INSTRUCTION}


def of_episode(episode: Episode, ambiguous_steps: int) -> list[Segment]:
    if not episode.success:
        return [Segment(episode=episode, frames=range(episode.length), success=False)]
    last = episode.length - 1
    left_out = -(-ambiguous_steps // int(episode.metadata.get("chunk", 1)))
    before = range(max(0, last - left_out))
    found = [Segment(episode=episode, frames=range(last, last + 1), success=True)]
    return found + ([Segment(episode=episode, frames=before, success=False)] if before else [])


def start_of(episode: Episode) -> str:
    """Where it began: episodes of one start are never in two parts."""
    origin = episode.provenance
    return f"{origin.task}/{origin.origin if origin.init_state is None else origin.init_state}"


def check(episodes: Iterable[Episode], settings: config.Classifier) -> None:
    """DataError for what must not be learned from, before anything is trained."""
    tasks = set()
    for episode in episodes:
        tasks.add(episode.provenance.task)
        if episode.provenance.split != "train":
            raise DataError(
                f"the episode {episode.label} is from a {episode.provenance.split} state, which is not for training",
                "leave its source out of classifier.sources in params.yaml",
            )
    if len(tasks) > 1 and INSTRUCTION not in settings.inputs:
        raise DataError(
            f"the episodes are of {len(tasks)} tasks ({', '.join(sorted(tasks))}), and the classifier does not see "
            "which one an image is of",
            f"add {INSTRUCTION} to classifier.inputs in params.yaml",
        )


def shapes(episodes: Sequence[Episode]) -> dict[str, tuple[int, ...]]:
    """Of the observations, the same in all episodes; the first one that differs is named."""
    if not episodes:
        raise DataError("there is no episode to learn from", "edit classifier.sources in params.yaml")
    first = _shapes(episodes[0])
    for episode in episodes[1:]:
        images = {name: shape for name, shape in _shapes(episode).items() if len(shape) > 1}
        for name, shape in first.items():
            if len(shape) > 1 and images.get(name, shape) != shape:
                raise DataError(
                    f"{name} has shape {list(images[name])} in the episode {episode.label}, and {list(shape)} before",
                    "use sources whose images have the same size",
                )
    common = set(first).intersection(*map(_shapes, episodes))
    return {**{name: shape for name, shape in first.items() if name in common}, INSTRUCTION: ()}


def _shapes(episode: Episode) -> Shapes:
    return {name: values.shape[1:] for name, values in episode.observations.items()}


def split(episodes: Iterable[Episode], settings: config.Classifier, seed: int) -> dict[str, Part]:
    """The part of every start. Of each task, starts with and without a success are divided by the same shares."""
    solved: dict[str, dict[str, bool]] = {}
    for episode in episodes:
        of_task = solved.setdefault(episode.provenance.task, {})
        of_task[start_of(episode)] = of_task.get(start_of(episode), False) or episode.success
    parts: dict[str, Part] = {}
    for number, (task, starts) in enumerate(sorted(solved.items())):
        for success in (True, False):
            names = sorted(start for start, succeeded in starts.items() if succeeded == success)
            if success and len(names) < _FEWEST:
                raise DataError(
                    f"{task} has {len(names)} start(s) with a successful episode, and training, calibration and test "
                    "need one each",
                    f"record or import more successful episodes of {task}",
                )
            order = np.random.default_rng([seed, number, success]).permutation(len(names))
            parts |= _divided([names[index] for index in order], settings)
    return parts


def _divided(names: Sequence[str], settings: config.Classifier) -> dict[str, Part]:
    """In this order; with three or more, no part is empty."""
    fewest = int(len(names) >= _FEWEST)
    test = max(fewest, round(settings.test_share * len(names)))
    calibration = max(fewest, round(settings.calibration_share * len(names)))
    counts: Mapping[Part, int] = {"test": test, "calibration": calibration}
    held = [part for part, count in counts.items() for _ in range(count)][: max(0, len(names) - fewest)]
    return {name: held[place] if place < len(held) else "train" for place, name in enumerate(names)}


def by_part(episodes: Iterable[Episode], parts: Mapping[str, Part], ambiguous_steps: int) -> dict[Part, list[Segment]]:
    found: dict[Part, list[Segment]] = {part: [] for part in PARTS}
    for episode in episodes:
        found[parts[start_of(episode)]] += of_episode(episode, ambiguous_steps)
    return found


def check_labels(segments: Sequence[Segment]) -> None:
    """DataError if the segments to train on do not show both success and its absence."""
    if not any(not segment.success for segment in segments):
        raise DataError(
            "no episode to train on shows a frame without success: none failed, and classifier.ambiguous_steps leaves "
            "nothing of those that succeeded",
            "lower classifier.ambiguous_steps in params.yaml, or record failures with nightshift classifier record",
        )


class Frames:
    """All frames of segments, by label; images are read when they are drawn."""

    def __init__(self, segments: Sequence[Segment], names: Sequence[str]) -> None:
        self._segments = segments
        self._names = names

    @cached_property
    def by_label(self) -> dict[bool, NDArray[np.int64]]:
        """[N, 2]: number of the segment, step of its episode."""
        rows: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        for number, segment in enumerate(self._segments):
            rows[segment.success] += [(number, frame) for frame in segment.frames]
        return {label: np.array(found, np.int64).reshape(-1, 2) for label, found in rows.items()}

    def observe(self, rows: NDArray[np.int64]) -> Observation:
        parts = [self._segments[number].observe(self._names, [frame]) for number, frame in rows.tolist()]
        return {name: np.concatenate([part[name] for part in parts]) for name in self._names}

    def balanced(self, generator: np.random.Generator, count: int) -> tuple[Observation, NDArray[np.float32]]:
        """`count` random frames, the first half of which show success, and their labels."""
        half = count // 2
        drawn = [
            self.by_label[label][generator.integers(len(self.by_label[label]), size=half)] for label in (True, False)
        ]
        return self.observe(np.concatenate(drawn)), np.repeat(np.array([1, 0], np.float32), half)
