"""RLDS without TensorFlow: TF-Agents trajectories, pushing RLDS episodes into a replay, and conversion of our episodes.

TF-Agents' converter makes a trajectory of two adjacent steps: the current step, and the type of the next one. The last
step of an episode is paired with a first step (the boundary), so N steps give N trajectories. `discount` has TF-Agents'
values: it is 0 where the *current* step is terminal, so an agent that uses it bootstraps from the terminal state in the
transition before. `mask` avoids that: it is 0 exactly where the *next* step is terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from nightshift.data import episode as episodes_
from nightshift.data import rlds_validation as validation
from nightshift.data.episode import EXTRAS, NO_POLICY, OBSERVATIONS, Episode
from nightshift.data.rlds_validation import ArraySpec, RldsEpisode, RldsStep, StackedEpisode, Tree
from nightshift.data.tensors import DTYPES, Column
from nightshift.errors import DataError

FIRST, MID, LAST = 0, 1, 2
PAIR = 2
"""The window size of TF-Agents: the current step and the next."""

PolicyInfo = Callable[[RldsStep, RldsStep | None], Tree]
"""Computes policy_info from the current and the next step; the next is None after the last step of an episode."""


class TFAgentsTrajectory(NamedTuple):
    """One row per pair of steps, or its spec, whose leaves are ArraySpecs. policy_info is {} if there is none."""

    step_type: Any
    observation: Any
    action: Any
    policy_info: Any
    next_step_type: Any
    reward: Any
    discount: Any
    mask: Any


def create_trajectory_spec(dataset: Iterable[RldsEpisode], policy_info: PolicyInfo | None = None) -> TFAgentsTrajectory:
    """The spec of the trajectories of pairs; reads the first two steps."""
    for number, episode in enumerate(dataset):
        steps = list(islice(validation.steps_of(episode), 2))
        for place, step in enumerate(steps):
            validation.step_spec(step, f"episode {number}", place)
        if steps:
            return _spec(steps[0], _info(policy_info, steps[0], steps[1] if len(steps) > 1 else None))
    raise validation.no_steps()


def episodes_to_trajectories(
    episodes: Iterable[RldsEpisode], window: int = PAIR, policy_info: PolicyInfo | None = None
) -> Iterator[TFAgentsTrajectory]:
    """Every window of adjacent steps, including the boundary after the last step; no window spans two episodes.

    A pair is one row; a longer window has `window` - 1 rows along the first axis. An episode of n steps gives
    n + 2 - `window` windows. Invalid steps raise DataError when they are reached.
    """
    if window < PAIR:
        raise DataError(f"a window of {window} steps holds no pair of steps", f"use {PAIR} or more")
    return (
        trajectory for e in validation.validated_episodes(episodes) for trajectory in _windows(e, window, policy_info)
    )


def _windows(episode: StackedEpisode, window: int, policy_info: PolicyInfo | None) -> Iterator[TFAgentsTrajectory]:
    rows = _rows(episode, policy_info)
    for start in range(len(episode.steps) + 2 - window):
        place = start if window == PAIR else slice(start, start + window - 1)
        yield TFAgentsTrajectory(*(validation.map_tree(itemgetter(place), field) for field in rows))


def _rows(episode: StackedEpisode, policy_info: PolicyInfo | None) -> TFAgentsTrajectory:
    fields, steps = episode.fields, episode.steps
    last, terminal = (np.asarray(fields[name]) for name in ("is_last", "is_terminal"))
    types = np.full(len(steps), MID, np.int32)
    types[0], types[-1] = FIRST, LAST  # the only step of an episode is LAST, and so is its next
    following = np.append(types[1:], np.int32(LAST if len(steps) == 1 else FIRST))
    discount = np.array(fields["discount"])
    discount[last & terminal] = 0
    infos = [_info(policy_info, step, after) for step, after in zip(steps, [*steps[1:], None], strict=True)]
    return TFAgentsTrajectory(
        step_type=types,
        observation=fields["observation"],
        action=fields["action"],
        policy_info=validation.stack(infos),
        next_step_type=following,
        reward=fields["reward"],
        discount=discount,
        mask=_masks(terminal),
    )


def _masks(terminal: NDArray[np.bool_]) -> NDArray[np.float32]:
    """[N] masks: 0 exactly where the next step is terminal."""
    return 1 - np.append(terminal[1:], False).astype(np.float32)


def _info(policy_info: PolicyInfo | None, step: RldsStep, after: RldsStep | None) -> Tree:
    return {} if policy_info is None else policy_info(step, after)


def _spec(step: RldsStep, info: Tree) -> TFAgentsTrajectory:
    def spec(tree: Tree) -> Any:
        return validation.map_tree(lambda array: ArraySpec(array.dtype.name, array.shape), tree)

    kind = ArraySpec("int32", ())
    return TFAgentsTrajectory(
        step_type=kind,
        observation=spec(step["observation"]),
        action=spec(step["action"]),
        policy_info=spec(info),
        next_step_type=kind,
        reward=spec(step["reward"]),
        discount=spec(step["discount"]),
        mask=ArraySpec("float32", ()),
    )


@dataclass(frozen=True, kw_only=True)
class Transitions:
    """The N - 1 transitions of an episode of N steps; the boundary and the last action are left out."""

    observation: Tree  # each [N, …]: transition t goes from step t to step t + 1
    action: Tree  # each [N - 1, …]
    reward: Column  # [N - 1, …]
    discount: Column  # [N - 1, …] as in the steps
    mask: NDArray[np.float32]  # [N - 1] 0 exactly where the next step is terminal
    terminated: bool

    @property
    def length(self) -> int:
        return len(self.mask)


class ReplayWriter(Protocol):
    """The interface of a replay for `push_to_replay`."""

    @property
    def spec(self) -> TFAgentsTrajectory | None:
        """The spec of its trajectories (see `create_trajectory_spec`); None if it accepts any."""
        ...

    def add(self, episodes: Sequence[Transitions]) -> int:
        """Store all episodes, or none if this raises; returns the number of transitions stored."""
        ...


def push_to_replay(episodes: Iterable[RldsEpisode], replay: ReplayWriter) -> int:
    """Store the transitions of all episodes, or none if any is invalid; returns the number stored.

    All episodes are read into memory and validated before the first is stored; the spec is compared first.
    """
    source = iter(episodes)
    opening = []
    for number, episode in enumerate(source):
        opening.append(list(validation.steps_of(episode)))
        if opening[number]:
            break
    _check_spec(create_trajectory_spec(opening), replay.spec)
    transitions = [_transitions(e) for e in validation.validated_episodes(chain(opening, source))]
    return replay.add([entry for entry in transitions if entry.length])


def _check_spec(found: TFAgentsTrajectory, wanted: TFAgentsTrajectory | None) -> None:
    for name in TFAgentsTrajectory._fields if wanted is not None else ():
        if getattr(found, name) != getattr(wanted, name):
            raise DataError(
                f"{name} of the data is {getattr(found, name)}; the replay holds {getattr(wanted, name)}",
                "push into a replay with the spec of the data",
            )


def _transitions(episode: StackedEpisode) -> Transitions:
    fields = episode.fields
    terminal = np.asarray(fields["is_terminal"])
    action, reward, discount = (
        validation.map_tree(itemgetter(slice(-1)), fields[name]) for name in ("action", "reward", "discount")
    )
    return Transitions(
        observation=fields["observation"],
        action=action,
        reward=reward,
        discount=discount,
        mask=_masks(terminal)[:-1],
        terminated=bool(terminal[-1]),
    )


OBSERVATION = "observation/"
EXTRA_FIELDS = "extras/"
_NAMES = {
    "action": "actions",
    "reward": "rewards",
    "discount": "discounts",
    "intervention": "interventions",
    "policy_action": "policy_actions",
    "policy_version": "policy_versions",
}
"""Field names in RLDS steps and in our episodes."""
NIGHTSHIFT_FIELDS = ("intervention", "policy_action", "policy_version")
"""Fields that RLDS does not define."""


def to_fields(episode: Episode) -> dict[str, Column]:
    """All step fields, each [N, …]: "action", "observation/front", "extras/force", ..."""
    plain = {name: getattr(episode, ours) for name, ours in _NAMES.items()}
    flags = {name: getattr(episode, name) for name in validation.FLAGS}
    seen = {f"{OBSERVATION}{name}": column for name, column in episode.observations.items()}
    free = {f"{EXTRA_FIELDS}{name}": column for name, column in episode.extras.items()}
    return {**flags, **plain, **seen, **free}


def from_fields(fields: Mapping[str, Column], header: Mapping[str, Any], where: str) -> Episode:
    """The inverse of `to_fields` and `episode.header`. Unknown fields become extras. By default there are no
    interventions, the policy action is the action, and the policy version is NO_POLICY."""
    given = dict(fields)
    _check_order(given, header, where)
    plain = {ours: given.pop(name) for name, ours in _NAMES.items() if name in given}
    actions = plain["actions"]
    defaults = {
        "interventions": np.zeros(len(actions), np.bool_),
        "policy_actions": actions,
        "policy_versions": np.full(len(actions), NO_POLICY, np.int64),
    }
    rest = _by_name(((_our_name(name), column) for name, column in given.items()), where)
    return episodes_.assemble({**defaults, **plain, **rest}, header)


def to_steps(episode: Episode) -> list[dict[str, Any]]:
    """The episode as RLDS steps, with the additional fields intervention, policy_action, policy_version and extras."""
    fields = to_fields(episode)
    top = {name: column for name, column in fields.items() if not name.startswith((OBSERVATION, EXTRA_FIELDS))}
    groups = {"observation": episode.observations} | ({"extras": episode.extras} if episode.extras else {})
    return [
        {name: column[t] for name, column in top.items()}
        | {group: {name: column[t] for name, column in columns.items()} for group, columns in groups.items()}
        for t in range(episode.length)
    ]


def from_steps(steps: RldsEpisode, header: Mapping[str, Any]) -> Episode:
    """The episode of RLDS steps; `header` holds the rest of it, as returned by `episode.header`.

    Nested observations are named "outer/inner". Other fields become extras and must be numeric.
    """
    (stacked,) = validation.validated_episodes([steps])
    free = {name: _stacked_extra(name, stacked.steps) for name in stacked.steps[0] if name not in validation.FIELDS}
    trees = {**stacked.fields, **free}
    flat = _by_name((leaf for name, tree in trees.items() for leaf in validation.leaves(tree, name)), "these steps")
    return from_fields(flat, header, "these steps")


def _stacked_extra(name: str, steps: Sequence[RldsStep]) -> Tree:
    try:
        tree = validation.stack([step[name] for step in steps])
        wrong = [path for path, column in validation.leaves(tree, name) if column.dtype.name not in DTYPES]
    except (ValueError, TypeError, KeyError, IndexError):
        wrong = [name]
    if wrong:
        raise DataError(
            f"{', '.join(wrong)} of these steps is not numeric with a fixed shape",
            "put it into the metadata of the header",
        )
    return tree


def _our_name(name: str) -> str:
    if name == OBSERVATION[:-1] or name.startswith(OBSERVATION):
        return f"{OBSERVATIONS}{name.removeprefix(OBSERVATION)}"
    return f"{EXTRAS}{name.removeprefix(EXTRA_FIELDS)}"


def _by_name(columns: Iterable[tuple[str, Column]], where: str) -> dict[str, Column]:
    named: dict[str, Column] = {}
    for name, column in columns:
        if name in named:
            raise DataError(f"{where}: two fields of its steps are named {name}", "rename one of them")
        named[name] = column
    return named


def _check_order(fields: dict[str, Column], header: Mapping[str, Any], where: str) -> None:
    """Remove the flags from the fields, after checking them against the header and the order of steps."""
    flags = {name: fields.pop(name) for name in validation.FLAGS}
    validation.check_order(flags, where)
    if bool(flags["is_terminal"][-1]) != header["terminated"]:
        raise DataError(f"{where}: is_terminal of the last step and terminated of the episode differ")
