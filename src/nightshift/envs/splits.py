"""Which training init states are learned from, and which are set aside for validation."""

from __future__ import annotations

from typing import NamedTuple

from nightshift import config, envs
from nightshift.errors import ConfigError
from nightshift.types import Task

_FEWEST = 2


class TrainingStates(NamedTuple):
    """Indices into a task's training init states. No demo and no RL group starts from a validation state."""

    train: range
    validation: range


def split_training_states(task: Task, states: config.States) -> TrainingStates:
    """The last `validation_share` of the states is set aside. The states are independent draws, so both parts have the
    same distribution."""
    count = envs.init_state_count(task, "train")
    if count < _FEWEST:
        raise ConfigError(
            f"{task.name} has {count} training init state(s), and one has to be set aside for validation",
            "raise states.per_task in params.yaml",
        )
    held_out = min(max(1, round(states.validation_share * count)), count - 1)
    return TrainingStates(train=range(count - held_out), validation=range(count - held_out, count))
