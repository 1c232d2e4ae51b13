"""What the simulation of a task is built from, and the sizes of what it takes and gives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol as Interface

from nightshift.envs.base import ActionSpace, States
from nightshift.envs.protocols import Protocol
from nightshift.types import Split, Task

ACTIONS = ActionSpace(size=7)
"""Operational-space control: Δposition (3), Δrotation (3), gripper (-1 opens, +1 closes)."""

OBJECTS_OF_INTEREST = 2
"""Objects that the observations describe, in the order of the BDDL file; missing ones are zeros."""
FEATURES_PER_OBJECT = 12  # position 3, first two columns of the rotation 6, position relative to the gripper 3
GRIPPER_FEATURES = 6  # height 1, rotation 3, fingers 2: proprio without the position on the table
STATE_SIZES = {
    "proprio": 8,
    "state": 8,
    "objects": OBJECTS_OF_INTEREST * FEATURES_PER_OBJECT + 1,  # and one articulation joint
    "egocentric": GRIPPER_FEATURES + OBJECTS_OF_INTEREST * 3 + 1,
}
"""Sizes of the observations that every step computes; libero/observations.py says what they hold."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The files of one task."""

    bddl: Path
    assets: Path
    scene: Path | None = None  # None: the scene that LIBERO's problem class names
    objects: str | None = None  # module that registers further objects with LIBERO when it is imported


class ProblemSource(Interface):
    """What a simulation asks its suite for."""

    arm_noise: float
    """Standard deviation of the arm's joints in drawn init states, in radians."""

    def problem(self, task: Task) -> Problem: ...

    def load_init_states(self, task: Task, split: Split) -> States: ...

    def settle_steps(self, protocol: Protocol) -> int: ...
