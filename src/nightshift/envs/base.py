"""The seams every simulator sits behind: one alone, and several of one task that step together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from nightshift.types import Array, Observation, Scene, Split, Task

Camera = Literal["agentview", "wrist"]
CAMERAS: tuple[Camera, ...] = get_args(Camera)


class Step(NamedTuple):
    """What one action led to. The reward is sparse: 1 exactly when `success`."""

    observation: Observation
    success: bool


class Env(Protocol):
    """One task in one simulator. Same init state and actions give the same steps, bit for bit."""

    @property
    def task(self) -> Task: ...

    def reset(self, split: Split, init_state: int) -> Observation: ...

    def step(self, action: Array) -> Step: ...

    def scene(self) -> Scene: ...

    def full_state(self) -> NDArray[np.float64]:
        """Everything the simulation goes on from, [D]; D differs from task to task."""
        ...

    def look(self, cameras: Sequence[Camera]) -> Mapping[Camera, NDArray[np.uint8]]:
        """What a policy sees through each camera now, [H, W, 3]. Not part of a step: a picture costs more than one."""
        ...

    def render(self) -> NDArray[np.uint8] | None:
        """A picture [H, W, 3] for people, or None where no GL library is present."""
        ...

    def close(self) -> None: ...


class Steps(NamedTuple):
    """What one action each led to, for N simulators."""

    observation: Observation  # each [N, D]; overwritten by the next step
    success: NDArray[np.bool_]  # [N]
    unstable: NDArray[np.bool_]  # [N] the actions drove the physics unstable; the observation means nothing then


class Fleet(Protocol):
    """Several simulators of one task. What one of them shows does not depend on the others."""

    @property
    def task(self) -> Task: ...

    def reset(self, split: Split, init_states: Sequence[int]) -> Observation:
        """One simulator for every init state; each observation [N, D]."""
        ...

    def step(self, actions: Array, active: NDArray[np.bool_]) -> Steps:
        """Step the active simulators with their rows of `actions` [N, A]; the others stay as they are."""
        ...

    def scene(self, lane: int) -> Scene: ...

    def render(self, lane: int) -> NDArray[np.uint8] | None: ...

    def close(self) -> None: ...
