"""What the pilot moves: simulators (`simulators.py`) or a robot behind HTTP (`robot.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from nightshift.errors import SimulatorError
from nightshift.teleop.mirror import Development, Image
from nightshift.types import Array, Observation, Task


class PlantFault(SimulatorError):
    """What is moved cannot be trusted any more: the episode in the making is invalid."""


class After(NamedTuple):
    """What follows a control step."""

    observation: Observation
    """Of a plant that became unstable, the one before."""
    success: bool
    unstable: bool


class Plant(Protocol):
    """One thread calls all of it, but for `let_go`. Everything may raise PlantFault, but for `stop` and `close`."""

    @property
    def judge(self) -> str:
        """Who says that the task is solved, besides the pilot."""
        ...

    @property
    def needs_pilot(self) -> bool:
        """Whether a reset moves something that a person has to watch over."""
        ...

    def open(self, task: Task) -> None:
        """Before anything else. Nothing moves; it may be looked at as it is."""
        ...

    def reset(self, task: Task, init_state: int) -> Observation:
        """Bring everything to a training state."""
        ...

    def wake(self) -> Observation:
        """Make ready to move after a reset, a stop or a while without steps; what there is to see now."""
        ...

    def step(self, action: Array) -> After: ...

    def idle(self) -> None:
        """A control period without a step."""
        ...

    def stop(self, why: str) -> bool:
        """Nothing moves until `wake`; whether that is certain."""
        ...

    def look(self, cameras: Sequence[str]) -> Mapping[str, Image]:
        """What these cameras show in the newest state, each [1, S, S, 3], as a policy sees it."""
        ...

    def develop(self, actions: Array, cameras: Sequence[str]) -> Future[Development]:
        """The pictures of the episode that these actions [T, A] made since the last reset."""
        ...

    def let_go(self) -> None:
        """Wait for no person any more; from any thread."""
        ...

    def close(self) -> None: ...
