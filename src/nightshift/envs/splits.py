"""Which training init states are learned from, and which are set aside for validation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from nightshift import config, envs
from nightshift.envs import protocols
from nightshift.errors import ConfigError, DataError, SimulatorError
from nightshift.types import Provenance, Task

_FEWEST = 2


class TrainingStates(NamedTuple):
    """Indices into a task's training init states. No demo and no RL group starts from a validation state."""

    train: range
    validation: range


def split_training_states(task: Task, states: config.States) -> TrainingStates:
    """The last `validation_share` of the states is set aside. The states are independent draws, so both parts have the
    same distribution."""
    return _split(task, envs.init_state_count(task, "train"), states)


def planned_training_states(env: config.Env, states: config.States) -> dict[str, TrainingStates]:
    """Of every task, as `split_training_states` will be, before the states of a suite that ships none are drawn."""
    return {task.name: _split(task, _planned_count(task, states), states) for task in envs.tasks(env)}


def _planned_count(task: Task, states: config.States) -> int:
    return states.per_task if envs.lacks_train_states(task) else envs.init_state_count(task, "train")


def evaluation_states(
    task: Task, env: config.Env, init_states: config.CountOrAuto, parameter: str = "evaluate.init_states"
) -> range:
    """The first `init_states` held-out states of a task; `parameter` of params.yaml says how many."""
    wanted = protocols.find(env.protocol).trials if init_states == "auto" else init_states
    available = envs.init_state_count(task, "eval")
    if wanted > available:
        raise SimulatorError(
            f"{task.name} has {available} evaluation init states, {wanted} are asked for",
            f"lower {parameter} in params.yaml",
        )
    return range(wanted)


def check_validation_states(states: Mapping[str, TrainingStates], level: float, name: str) -> None:
    """With few states even a policy that wins on all of them is not better at the level: training would be in vain."""
    count = sum(len(split.validation) for split in states.values())
    if 0.5**count > level:
        raise ConfigError(
            f"{count} validation states cannot show a gain at {name} {level:g}",
            f"raise states.per_task, states.validation_share or {name} in params.yaml",
        )


def check_none_from_validation(
    episodes: Iterable[tuple[str, Provenance]], states: Mapping[str, TrainingStates], leave_out: str
) -> None:
    """DataError if an episode to learn from began in a state that is set aside now: policies are chosen by these.

    Each comes with what it is called in a message. `leave_out`: how to do without it.
    """
    for name, origin in episodes:
        if origin.task in states and origin.init_state in states[origin.task].validation:
            raise DataError(
                f"{name} begins at training state {origin.init_state} of {origin.task}, which is set aside for "
                "validation now",
                f"lower states.validation_share in params.yaml, or {leave_out}",
            )


def check_demo_states(states: Mapping[str, TrainingStates], collect: config.Collect) -> None:
    """ConfigError if a task has fewer training states than demos are asked for."""
    for task, split in states.items():
        if len(split.train) < collect.demos_per_task:
            raise ConfigError(
                f"collect.demos_per_task is {collect.demos_per_task}, but {task} has {len(split.train)} training "
                "states, one for each demo",
                "lower collect.demos_per_task in params.yaml; a LIBERO suite draws more with states.per_task",
            )


def _split(task: Task, count: int, states: config.States) -> TrainingStates:
    if count < _FEWEST:
        raise ConfigError(
            f"{task.name} has {count} training init state(s), and one has to be set aside for validation",
            "raise states.per_task in params.yaml",
        )
    held_out = min(max(1, round(states.validation_share * count)), count - 1)
    return TrainingStates(train=range(count - held_out), validation=range(count - held_out, count))
