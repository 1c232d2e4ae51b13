"""The seam of a robot server: what an arm has to do. The protocol around it is `controller.Controller`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from nightshift.envs.robot.messages import Description, RobotState
from nightshift.envs.robot.poses import Vector
from nightshift.types import Scene


class Arm(Protocol):
    """Calls come from one thread, but for `hold` and `stop`, which may come from any thread at any time."""

    @property
    def description(self) -> Description: ...

    def measure(self, cameras: Sequence[str]) -> RobotState:
        """The present state, with images of `cameras`; the controller fills in `mode`."""
        ...

    def move(self, target: Vector, gripper: float | None, action: Vector | None) -> None:
        """Go towards a pose [7]. A simulator makes one control step. `gripper`: 0 closed, 1 open, None as it is.
        `action`: the normalised action that the target stands for, with the capability "action"."""
        ...

    def grip(self, opening: float) -> None:
        """0 closed, 1 open. A simulator moves its fingers in the control steps that follow."""
        ...

    def joint_reset(self) -> None:
        """Go to the rest joints, and return when there."""
        ...

    def reset(self, task: str, split: str, init_state: int) -> None:
        """An exact start, with the capability "init_states"."""
        ...

    def update_param(self, values: Mapping[str, float]) -> None:
        """Compliance parameters, by the names of the description; BadMessage for a number that the arm cannot bear,
        before any of them is set."""
        ...

    def scene(self) -> Scene:
        """Poses of everything, with the capability "scene"."""
        ...

    def clear_error(self) -> None:
        """After a hold or a stop: be ready to move. Commands from before have no effect. If `stop` comes while this
        runs, it wins."""
        ...

    def hold(self) -> None:
        """Keep the present pose: nothing has been heard for too long. After `stop` it does nothing."""
        ...

    def stop(self) -> None:
        """At once, and until `clear_error`: a movement that runs ends, `joint_reset` returns, and a `move`, `grip`,
        `joint_reset`, `reset` or `hold` that comes later does nothing. The controller asks before it moves the arm, and
        repeats a stop that came meanwhile; what happens in between is the arm's."""
        ...
