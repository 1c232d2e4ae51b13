"""Draws init states from LIBERO's placement samplers: settled, pairwise different, not solved yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count

import numpy as np
from numpy.typing import NDArray

from nightshift.envs.base import DrawnState
from nightshift.envs.libero.env import LiberoEnv
from nightshift.errors import SimulatorError

State = NDArray[np.float64]

SAME = 1e-4
"""Two states count as equal if every position agrees within this (metres, radians)."""
MAX_REJECTED = 100
"""Draws in a row that may be rejected."""


def draw(env: LiberoEnv, seed: int, known: Iterable[State], start: int = 0) -> Iterator[DrawnState]:
    """An endless iterator from draw number `start` on; no state equals a `known` one or an earlier one.

    Draw number i depends only on `seed`, the task and i, so that drawing can stop anywhere and resume.
    """
    taken = [env.positions_in(state) for state in known]
    accepted = start
    for attempt in count(start):
        if attempt - accepted > MAX_REJECTED:
            what = f"{MAX_REJECTED} draws in a row of {env.task.name} gave no state that is new and unsolved"
            raise SimulatorError(what, "ask for fewer states: states.per_task in params.yaml")
        sampler_seed = int(np.random.SeedSequence([seed, env.task.index, attempt]).generate_state(1)[0])
        state = env.sample_state(sampler_seed)
        if state is None:
            continue
        positions = env.positions_in(state)
        is_new = not any(np.abs(positions - other).max() < SAME for other in taken)
        if is_new and not env.is_solved_in(state):
            accepted = attempt
            taken.append(positions)
            yield DrawnState(state, sampler_seed, attempt)
