"""Drawing init states from LIBERO's placement samplers: settled, no two alike, none solved already."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nightshift.envs.libero import LiberoEnv
from nightshift.errors import SimulatorError

State = NDArray[np.float64]

SAME = 1e-4
"""Two states are one when no joint or object is further apart (metres, radians)."""
PATIENCE = 100
"""Draws in a row that may be of no use."""


class Drawn(NamedTuple):
    state: State  # [D]
    seed: int  # of the placement samplers: it alone gives this state again
    attempt: int  # position among all draws of this task


def draw(env: LiberoEnv, seed: int, known: Iterable[State], start: int = 0) -> Iterator[Drawn]:
    """New states without end, beginning with draw number `start`; none is like a `known` one or one given out before.

    Draw number i depends on `seed`, the task and i alone, so drawing can stop anywhere and go on later.
    """
    seen = [env.positions_in(state) for state in known]
    used = start
    for attempt in count(start):
        if attempt - used > PATIENCE:
            what = f"{PATIENCE} draws in a row of {env.task.name} gave no state that is new and unsolved"
            raise SimulatorError(what, "ask for fewer states: states.per_task in params.yaml")
        number = int(np.random.SeedSequence([seed, env.task.index, attempt]).generate_state(1)[0])
        state = env.sample_state(number)
        if state is None:
            continue
        positions = env.positions_in(state)
        is_new = not any(np.abs(positions - other).max() < SAME for other in seen)
        if is_new and not env.is_solved_in(state):
            used = attempt
            seen.append(positions)
            yield Drawn(state, number, attempt)
