"""The seam every simulator sits behind."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from nightshift.types import Array, Observation, Scene, Split, Task


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

    def render(self) -> NDArray[np.uint8] | None:
        """A picture [H, W, 3] of the scene, or None where no GL library is present."""
        ...

    def close(self) -> None: ...
