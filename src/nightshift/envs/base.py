"""The seam every simulator sits behind."""

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
