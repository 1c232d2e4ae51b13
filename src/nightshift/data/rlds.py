"""RLDS without TensorFlow: TF-Agents' trajectories of steps, a push into a replay, and our episodes from and to steps.

A trajectory is what TF-Agents' converter makes of two adjacent steps: the current one, and the kind of the next. The
last step of an episode is paired with a first one, its boundary, so N steps give N trajectories. `discount` has
TF-Agents' numbers: it is 0 where the *current* step is terminal, so an agent that trusts it bootstraps through the
transition before, which leads into the terminal state. `mask` does not let it: it is 0 exactly where the *next* is.
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
from nightshift.data import rlds_rules as rules
from nightshift.data.episode import EXTRAS, NO_POLICY, OBSERVATIONS, Episode
from nightshift.data.rlds_rules import ArraySpec, Stacked, Step, Steps, Tree
from nightshift.data.tensors import DTYPES, Column
from nightshift.errors import DataError

FIRST, MID, LAST = 0, 1, 2
PAIR = 2
"""The window of TF-Agents: the current step and the next."""

PolicyInfo = Callable[[Step, Step | None], Tree]
"""Of the current step and the next one; None after the last step of an episode."""


class Trajectory(NamedTuple):
    """One row per pair of steps; or its spec, where every leaf is an ArraySpec. No policy_info is {}."""

    step_type: Any
    observation: Any
    action: Any
    policy_info: Any
    next_step_type: Any
    reward: Any
    discount: Any
    mask: Any


def create_trajectory_spec(dataset: Iterable[Steps], policy_info: PolicyInfo | None = None) -> Trajectory:
    """dtype and shape of what `episodes_to_trajectories` gives for pairs; reads the first two steps."""
    for number, episode in enumerate(dataset):
        steps = list(islice(rules.steps_of(episode), 2))
        for place, step in enumerate(steps):
            rules.shapes_of(step, f"episode {number}", place)
        if steps:
            return _spec(steps[0], _info(policy_info, steps[0], steps[1] if len(steps) > 1 else None))
    raise rules.no_steps()


def episodes_to_trajectories(
    episodes: Iterable[Steps], window: int = PAIR, policy_info: PolicyInfo | None = None
) -> Iterator[Trajectory]:
    """Every window of adjacent steps, the boundary after the last step included; no window spans two episodes.

    A pair is one row. A longer window has its `window` - 1 rows along a first axis. An episode of n steps gives
    n + 2 - `window` of them. What breaks a rule is refused when it is reached.
    """
    if window < PAIR:
        raise DataError(f"a window of {window} steps holds no pair of steps", f"use {PAIR} or more")
    return (trajectory for e in rules.sound_episodes(episodes) for trajectory in _windows(e, window, policy_info))


def _windows(episode: Stacked, window: int, policy_info: PolicyInfo | None) -> Iterator[Trajectory]:
    rows = _rows(episode, policy_info)
    for start in range(len(episode.steps) + 2 - window):
        place = start if window == PAIR else slice(start, start + window - 1)
        yield Trajectory(*(rules.map_tree(itemgetter(place), field) for field in rows))


def _rows(episode: Stacked, policy_info: PolicyInfo | None) -> Trajectory:
    fields, steps = episode.fields, episode.steps
    last, terminal = (np.asarray(fields[name]) for name in ("is_last", "is_terminal"))
    types = np.full(len(steps), MID, np.int32)
    types[0], types[-1] = FIRST, LAST  # a step that is both is alone, and LAST twice
    following = np.append(types[1:], np.int32(LAST if len(steps) == 1 else FIRST))
    discount = np.array(fields["discount"])
    discount[last & terminal] = 0
    infos = [_info(policy_info, step, after) for step, after in zip(steps, [*steps[1:], None], strict=True)]
    return Trajectory(
        step_type=types,
        observation=fields["observation"],
        action=fields["action"],
        policy_info=rules.stack(infos),
        next_step_type=following,
        reward=fields["reward"],
        discount=discount,
        mask=_masks(terminal),
    )


def _masks(terminal: NDArray[np.bool_]) -> NDArray[np.float32]:
    """[N]: 0 exactly where the next step is terminal."""
    return 1 - np.append(terminal[1:], False).astype(np.float32)


def _info(policy_info: PolicyInfo | None, step: Step, after: Step | None) -> Tree:
    return {} if policy_info is None else policy_info(step, after)


def _spec(step: Step, info: Tree) -> Trajectory:
    def spec(tree: Tree) -> Any:
        return rules.map_tree(lambda array: ArraySpec(array.dtype.name, array.shape), tree)

    kind = ArraySpec("int32", ())
    return Trajectory(
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
    """The N - 1 transitions of one episode of N steps: its boundary is none, and its last action led nowhere."""

    observation: Tree  # each [N, …]: transition t leads from t to t + 1
    action: Tree  # each [N - 1, …]
    reward: Column  # [N - 1, …]
    discount: Column  # [N - 1, …] as the steps have it
    mask: NDArray[np.float32]  # [N - 1] 0 exactly where the next step is terminal
    terminated: bool

    @property
    def length(self) -> int:
        return len(self.mask)


class Replay(Protocol):
    """What `push_to_replay` asks of a replay."""

    @property
    def spec(self) -> Trajectory | None:
        """What it holds, as `create_trajectory_spec` says it; None while it is open to anything."""
        ...

    def add(self, episodes: Sequence[Transitions]) -> int:
        """Store all or, with an error, none; how many transitions were stored."""
        ...


def push_to_replay(episodes: Iterable[Steps], replay: Replay) -> int:
    """Store the transitions of all episodes, or of none if anything is wrong anywhere; how many were really stored.

    All are checked, and held in memory, before the first is stored. A spec that is not the replay's comes first.
    """
    source = iter(episodes)
    opening = []
    for number, episode in enumerate(source):
        opening.append(list(rules.steps_of(episode)))
        if opening[number]:
            break
    _check_spec(create_trajectory_spec(opening), replay.spec)
    transitions = [_transitions(e) for e in rules.sound_episodes(chain(opening, source))]
    return replay.add([entry for entry in transitions if entry.length])


def _check_spec(found: Trajectory, wanted: Trajectory | None) -> None:
    for name in Trajectory._fields if wanted is not None else ():
        if getattr(found, name) != getattr(wanted, name):
            raise DataError(
                f"{name} of the data is {getattr(found, name)}; the replay holds {getattr(wanted, name)}",
                "push into a replay that was made for data like this",
            )


def _transitions(episode: Stacked) -> Transitions:
    fields = episode.fields
    terminal = np.asarray(fields["is_terminal"])
    action, reward, discount = (
        rules.map_tree(itemgetter(slice(-1)), fields[name]) for name in ("action", "reward", "discount")
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
FREE = "extras/"
_NAMES = {
    "action": "actions",
    "reward": "rewards",
    "discount": "discounts",
    "intervention": "interventions",
    "policy_action": "policy_actions",
    "policy_version": "policy_versions",
}
"""Of one field: in a step of RLDS, and in our episodes."""
OURS_ALONE = ("intervention", "policy_action", "policy_version")
"""Fields that RLDS knows nothing of."""


def to_fields(episode: Episode) -> dict[str, Column]:
    """Every field of the steps, each [N, …]: "action", "observation/front", "extras/force", ..."""
    plain = {name: getattr(episode, ours) for name, ours in _NAMES.items()}
    flags = {name: getattr(episode, name) for name in rules.FLAGS}
    seen = {f"{OBSERVATION}{name}": column for name, column in episode.observations.items()}
    free = {f"{FREE}{name}": column for name, column in episode.extras.items()}
    return {**flags, **plain, **seen, **free}


def from_fields(fields: Mapping[str, Column], header: Mapping[str, Any], where: str) -> Episode:
    """The episode of `to_fields` and `episode.header`. Fields that are not ours become extras; of a step at which we
    are told nothing else, nobody intervened and no policy of ours acted."""
    given = dict(fields)
    _check_order(given, header, where)
    plain = {ours: given.pop(name) for name, ours in _NAMES.items() if name in given}
    actions = plain["actions"]
    told_nothing = {
        "interventions": np.zeros(len(actions), np.bool_),
        "policy_actions": actions,
        "policy_versions": np.full(len(actions), NO_POLICY, np.int64),
    }
    rest = _by_name(((_our_name(name), column) for name, column in given.items()), where)
    return episodes_.assemble({**told_nothing, **plain, **rest}, header)


def to_steps(episode: Episode) -> list[dict[str, Any]]:
    """The episode as RLDS steps; what is ours alone is in the fields intervention, policy_action, policy_version and
    extras."""
    fields = to_fields(episode)
    top = {name: column for name, column in fields.items() if not name.startswith((OBSERVATION, FREE))}
    groups = {"observation": episode.observations} | ({"extras": episode.extras} if episode.extras else {})
    return [
        {name: column[t] for name, column in top.items()}
        | {group: {name: column[t] for name, column in columns.items()} for group, columns in groups.items()}
        for t in range(episode.length)
    ]


def from_steps(steps: Steps, header: Mapping[str, Any]) -> Episode:
    """The episode of RLDS steps; `header` is all that they do not say, as `episode.header` gives it.

    Observations nested in others are named "outer/inner"; free fields are stacked into extras, so they are numbers.
    """
    (stacked,) = rules.sound_episodes([steps])
    free = {name: _stacked_free(name, stacked.steps) for name in stacked.steps[0] if name not in rules.FIELDS}
    trees = {**stacked.fields, **free}
    flat = _by_name((leaf for name, tree in trees.items() for leaf in rules.leaves(tree, name)), "these steps")
    return from_fields(flat, header, "these steps")


def _stacked_free(name: str, steps: Sequence[Step]) -> Tree:
    try:
        tree = rules.stack([step[name] for step in steps])
        wrong = [path for path, column in rules.leaves(tree, name) if column.dtype.name not in DTYPES]
    except (ValueError, TypeError, KeyError, IndexError):
        wrong = [name]
    if wrong:
        raise DataError(
            f"{', '.join(wrong)} of these steps is not numbers of one shape", "put it into the header's metadata"
        )
    return tree


def _our_name(name: str) -> str:
    if name == OBSERVATION[:-1] or name.startswith(OBSERVATION):
        return f"{OBSERVATIONS}{name.removeprefix(OBSERVATION)}"
    return f"{EXTRAS}{name.removeprefix(FREE)}"


def _by_name(columns: Iterable[tuple[str, Column]], where: str) -> dict[str, Column]:
    named: dict[str, Column] = {}
    for name, column in columns:
        if name in named:
            raise DataError(f"{where}: two fields of its steps are named {name}", "rename one of them")
        named[name] = column
    return named


def _check_order(fields: dict[str, Column], header: Mapping[str, Any], where: str) -> None:
    """Take the flags out of the fields; the header and the order of steps say the same again."""
    flags = {name: fields.pop(name) for name in rules.FLAGS}
    rules.check_order(flags, where)
    if bool(flags["is_terminal"][-1]) != header["terminated"]:
        raise DataError(f"{where}: is_terminal of the last step and terminated of the episode differ")
