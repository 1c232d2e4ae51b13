"""Validation of RLDS steps. A step is a mapping: is_first, is_last, is_terminal, observation (an array or a nested dict
of arrays), action, reward, discount, and other fields. An episode is an iterable of steps, or a mapping with "steps"
and metadata.

All steps of a dataset must have the fields of the first step. An episode begins with its only first step and ends with
its only last step; a terminal step must be a last step. Episodes without steps are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nightshift.data.tensors import DTYPES, Column
from nightshift.errors import DataError

RldsStep = Mapping[str, Any]
RldsEpisode = Mapping[str, Any] | Iterable[RldsStep]
Tree = Column | Mapping[str, Any]
"""An array, or a nested dict of arrays."""

FLAGS = ("is_first", "is_last", "is_terminal")
FIELDS = ("observation", "action", "reward", "discount", *FLAGS)
"""Required fields of a step."""


@dataclass(frozen=True)
class ArraySpec:
    """The dtype and shape of an array of one step."""

    dtype: str
    shape: tuple[int, ...]


_FLAG = ArraySpec("bool", ())
StepSpec = Mapping[str, ArraySpec | None]
"""The arrays of a step by path; None for other fields, which may hold anything."""


@dataclass(frozen=True, kw_only=True)
class StackedEpisode:
    """A valid episode: its steps, and their fields stacked along a first axis of length N."""

    steps: Sequence[RldsStep]
    fields: Mapping[str, Tree]


def validated_episodes(dataset: Iterable[RldsEpisode]) -> Iterator[StackedEpisode]:
    """The episodes of a dataset one by one; DataError at the first invalid one, or if there are no steps at all."""
    shapes: StepSpec | None = None
    for number, episode in enumerate(dataset):
        where = f"episode {number}"
        steps = list(steps_of(episode))
        for place, step in enumerate(steps):
            found = step_spec(step, where, place)
            shapes = shapes or found
            _check_same(shapes, found, where, place)
        if steps:
            fields = {name: stack([step[name] for step in steps]) for name in FIELDS}
            check_order(fields, where)
            yield StackedEpisode(steps=steps, fields=fields)
    if shapes is None:
        raise no_steps()


def steps_of(episode: RldsEpisode) -> Iterable[RldsStep]:
    if not isinstance(episode, Mapping):
        return episode
    if "steps" not in episode:
        raise DataError(f"an episode of RLDS has no steps; it has {_join_names(episode)}", 'put them under "steps"')
    steps: Iterable[RldsStep] = episode["steps"]
    return steps


def step_spec(step: RldsStep, where: str, place: int) -> StepSpec:
    """The spec of a step; DataError if it is invalid."""
    if not isinstance(step, Mapping):
        raise invalid_step(where, place, f"it is a {type(step).__name__}, not a mapping of fields")
    if missing := [name for name in FIELDS if name not in step]:
        raise invalid_step(where, place, f"{_join_names(missing)} is missing; it has {_join_names(step)}")
    free: StepSpec = {name: None for name in step if name not in FIELDS}
    arrays: StepSpec = {path: _shape(a, path, where, place) for name in FIELDS for path, a in leaves(step[name], name)}
    for name in FLAGS:
        if arrays.get(name) != _FLAG:
            raise invalid_step(where, place, f"{name} is {step[name]!r}, not a bool")
    if nested := [name for name in ("reward", "discount") if name not in arrays]:
        raise invalid_step(where, place, f"{_join_names(nested)} is a mapping, not an array")
    return {**free, **arrays}


def stack(trees: Sequence[Tree]) -> Tree:
    """Stack trees of the same structure along a new first axis."""
    if isinstance(trees[0], Mapping):
        return {name: stack([tree[name] for tree in trees]) for name in trees[0]}
    return np.stack([np.asarray(tree) for tree in trees])


def map_tree(change: Callable[[Column], Any], tree: Tree) -> Any:
    """Apply a function to every array of a tree."""
    if isinstance(tree, Mapping):
        return {name: map_tree(change, branch) for name, branch in tree.items()}
    return change(np.asarray(tree))


def leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """All arrays of a tree with their paths."""
    if isinstance(tree, Mapping):
        for name, branch in tree.items():
            yield from leaves(branch, f"{path}/{name}")
    else:
        yield path, tree


def invalid_step(where: str, place: int, what: str) -> DataError:
    return DataError(f"{where}, step {place}: {what}", "fix the episode at its source, or leave it out")


def no_steps() -> DataError:
    return DataError("there are no RLDS steps in the data", "give at least one episode with steps")


def _shape(value: Any, path: str, where: str, place: int) -> ArraySpec:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise invalid_step(where, place, f"{path} is not an array: {error}") from None
    if array.dtype.name not in DTYPES:
        raise invalid_step(where, place, f"{path} is an array of {array.dtype}, not of numbers")
    return ArraySpec(array.dtype.name, array.shape)


def _check_same(expected: StepSpec, found: StepSpec, where: str, place: int) -> None:
    if expected == found:
        return
    path = next(path for path in {**expected, **found} if expected.get(path, path) != found.get(path, path))
    if path not in found:
        raise invalid_step(where, place, f"{path} is missing; the first step of the data has it")
    if path not in expected:
        raise invalid_step(where, place, f"{path} is new; the first step of the data does not have it")
    there = f"in the first step of the data it is {_describe(expected[path])}"
    raise invalid_step(where, place, f"{path} is {_describe(found[path])}; {there}")


def check_order(flags: Mapping[str, Tree], where: str) -> None:
    """Check the flags of one episode, each [N]."""
    first, last, terminal = (np.asarray(flags[name]) for name in FLAGS)
    middle = ~first & ~last
    _refuse(where, ~first[:1], "is not a first step: the data starts in the middle of an episode")
    _refuse(where, terminal & ~last, "is terminal; only the last step of an episode may be")
    _refuse(where, last[:-1] & ~first[1:], "is a last step; only a first step may follow it", after=True)
    _refuse(where, last[:-1] & first[1:], "is a last step; a new episode follows it inside this one", after=True)
    _refuse(where, middle[:-1] & first[1:], "is in the middle of an episode; no first step may follow it", after=True)
    _refuse(where, first[:-1] & first[1:], "is a first step, and so is the one after it", after=True)
    if not last[-1]:
        what = "is a first step and not a last one" if len(last) == 1 else "is not a last step"
        raise invalid_step(where, len(last) - 1, f"it {what}, but the episode ends there")


def _refuse(where: str, wrong: NDArray[np.bool_], what: str, *, after: bool = False) -> None:
    if wrong.any():
        place = int(np.argmax(wrong))
        raise invalid_step(where, place, f"it {what}" + (f" (step {place + 1})" if after else ""))


def _describe(spec: ArraySpec | None) -> str:
    return "free" if spec is None else f"{spec.dtype} {list(spec.shape)}"


def _join_names(names: Iterable[str]) -> str:
    return ", ".join(map(str, names)) or "nothing"
