"""What sound RLDS steps are. A step is a mapping: is_first, is_last, is_terminal, observation (an array, or arrays by
name, nested at will), action, reward, discount, and free fields; an episode is an iterable of steps, or a mapping that
holds them under "steps" beside its metadata.

All steps of a dataset have the fields of its first one. An episode begins with its only first step and ends with its
only last one; a terminal step is a last one. An episode of no steps is no episode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nightshift.data.tensors import DTYPES, Column
from nightshift.errors import DataError

Step = Mapping[str, Any]
Steps = Mapping[str, Any] | Iterable[Step]
Tree = Column | Mapping[str, Any]
"""An array, or trees by name."""

FLAGS = ("is_first", "is_last", "is_terminal")
FIELDS = ("observation", "action", "reward", "discount", *FLAGS)
"""What every step must have."""


@dataclass(frozen=True)
class ArraySpec:
    """One array of one step."""

    dtype: str
    shape: tuple[int, ...]


_FLAG = ArraySpec("bool", ())
Shapes = Mapping[str, ArraySpec | None]
"""The arrays of a step by path; None for free fields, which may hold anything."""


@dataclass(frozen=True, kw_only=True)
class Stacked:
    """One sound episode: its steps, and their fields along a first axis of N steps."""

    steps: Sequence[Step]
    fields: Mapping[str, Tree]


def sound_episodes(dataset: Iterable[Steps]) -> Iterator[Stacked]:
    """The episodes of a dataset one by one; DataError at the first that breaks a rule, or if there are no steps."""
    shapes: Shapes | None = None
    for number, episode in enumerate(dataset):
        where = f"episode {number}"
        steps = list(steps_of(episode))
        for place, step in enumerate(steps):
            found = shapes_of(step, where, place)
            shapes = shapes or found
            _check_same(shapes, found, where, place)
        if steps:
            fields = {name: stack([step[name] for step in steps]) for name in FIELDS}
            check_order(fields, where)
            yield Stacked(steps=steps, fields=fields)
    if shapes is None:
        raise no_steps()


def steps_of(episode: Steps) -> Iterable[Step]:
    if not isinstance(episode, Mapping):
        return episode
    if "steps" not in episode:
        raise DataError(f"an episode of RLDS has no steps; it has {_listed(episode)}", 'put them under "steps"')
    steps: Iterable[Step] = episode["steps"]
    return steps


def shapes_of(step: Step, where: str, place: int) -> Shapes:
    """DataError if it is no step."""
    if not isinstance(step, Mapping):
        raise broken(where, place, f"it is a {type(step).__name__}, not a mapping of fields")
    if missing := [name for name in FIELDS if name not in step]:
        raise broken(where, place, f"{_listed(missing)} is missing; it has {_listed(step)}")
    free: Shapes = {name: None for name in step if name not in FIELDS}
    arrays: Shapes = {path: _shape(a, path, where, place) for name in FIELDS for path, a in leaves(step[name], name)}
    for name in FLAGS:
        if arrays.get(name) != _FLAG:
            raise broken(where, place, f"{name} is {step[name]!r}, not a bool")
    if nested := [name for name in ("reward", "discount") if name not in arrays]:
        raise broken(where, place, f"{_listed(nested)} is a mapping, not an array")
    return {**free, **arrays}


def stack(trees: Sequence[Tree]) -> Tree:
    """Trees of one structure along a new first axis."""
    if isinstance(trees[0], Mapping):
        return {name: stack([tree[name] for tree in trees]) for name in trees[0]}
    return np.stack([np.asarray(tree) for tree in trees])


def map_tree(change: Callable[[Column], Any], tree: Tree) -> Any:
    """The tree with every array changed."""
    if isinstance(tree, Mapping):
        return {name: map_tree(change, branch) for name, branch in tree.items()}
    return change(np.asarray(tree))


def leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every array of a tree with its path."""
    if isinstance(tree, Mapping):
        for name, branch in tree.items():
            yield from leaves(branch, f"{path}/{name}")
    else:
        yield path, tree


def broken(where: str, place: int, what: str) -> DataError:
    return DataError(f"{where}, step {place}: {what}", "mend the episode at its source, or leave it out")


def no_steps() -> DataError:
    return DataError("there are no RLDS steps in the data", "give at least one episode with steps")


def _shape(value: Any, path: str, where: str, place: int) -> ArraySpec:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise broken(where, place, f"{path} is no array: {error}") from None
    if array.dtype.name not in DTYPES:
        raise broken(where, place, f"{path} is an array of {array.dtype}, not of numbers")
    return ArraySpec(array.dtype.name, array.shape)


def _check_same(expected: Shapes, found: Shapes, where: str, place: int) -> None:
    if expected == found:
        return
    path = next(path for path in {**expected, **found} if expected.get(path, path) != found.get(path, path))
    if path not in found:
        raise broken(where, place, f"{path} is missing; the first step of the data has it")
    if path not in expected:
        raise broken(where, place, f"{path} is new; the first step of the data does not have it")
    there = f"in the first step of the data it is {_said(expected[path])}"
    raise broken(where, place, f"{path} is {_said(found[path])}; {there}")


def check_order(flags: Mapping[str, Tree], where: str) -> None:
    """Of one episode: its flags, each [N]."""
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
        raise broken(where, len(last) - 1, f"it {what}, but the episode ends there")


def _refuse(where: str, wrong: NDArray[np.bool_], what: str, *, after: bool = False) -> None:
    if wrong.any():
        place = int(np.argmax(wrong))
        raise broken(where, place, f"it {what}" + (f" (step {place + 1})" if after else ""))


def _said(spec: ArraySpec | None) -> str:
    return "free" if spec is None else f"{spec.dtype} {list(spec.shape)}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(str, names)) or "nothing"
