"""The seam of interventions: asked before every control step whether somebody else acts instead of the policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nightshift.types import Array, Observation, Scene, Task


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What there is to look at before a control step."""

    step: int
    """Control steps since the episode began."""
    observation: Observation
    scene: Callable[[], Scene]
    """Poses of everything in the scene; computed on demand."""
    picture: Callable[[], NDArray[np.uint8] | None]
    """Of the scene, for people, [H, W, 3]; drawn on demand, and None where no GL library works."""
    policy_action: Array
    """What the policy would do, [A]."""


@dataclass(frozen=True, kw_only=True)
class PageSettings:
    """Of the web page where a person takes over."""

    address: tuple[str, int] = ("127.0.0.1", 0)
    """Host and port; port 0 is a free one."""
    patience_s: float = 0.0
    """Of a simulator with a pilot who has stopped it and does nothing; 0: for ever."""


class Intervention(Protocol):
    """The same moments of the same episode get the same answers from a scripted source; a person is free."""

    def before_reset(self) -> None:
        """Returns when the scene may be put back for the next episode, which moves a robot."""
        ...

    def begin(self, task: Task) -> None:
        """A new episode of `task`: nothing that was seen before counts."""
        ...

    def override(self, moment: Moment) -> Array | None:
        """The action to execute instead of the policy's, [A], or None: the policy acts."""
        ...

    def end(self) -> None:
        """The episode is over."""
        ...
