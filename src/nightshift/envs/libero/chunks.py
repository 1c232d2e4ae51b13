"""Chunks of control steps of many simulations, in one compiled call. Import it after `prepare`.

Between two control steps of a chunk Python has nothing to do unless a simulation may have reached its goal, which
LIBERO's own predicates decide, or has become unstable. So threads that simulate need the GIL once per chunk, and leave
it to the thread that draws and acts.
"""

from __future__ import annotations

import numba
import numpy as np

from nightshift.envs.libero.goal import judge
from nightshift.envs.libero.osc import advance


@numba.njit(cache=True, nogil=True)
def play(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    control_rows,  # [N, fields] addresses for `advance`
    state_rows,  # [N, fields] addresses for `judge`
    actions,  # [N, T, 7] clipped to [-1, 1]
    model,  # address
    control,  # the other arguments of `advance`
    goal,  # the other arguments of `judge`
    made,  # [N] control steps of the chunk that have been made, updated here
    possible,  # [N] whether the goal may be reached, set here
    unstable,  # [N] set here
):
    """Each simulation goes on until its chunk ends, or the goal may be reached, or its physics is unstable."""
    lanes = np.arange(len(control_rows))
    for lane in range(len(control_rows)):
        here = slice(lane, lane + 1)
        while made[lane] < actions.shape[1]:
            step = made[lane]
            advance(control_rows[here], actions[lane, step : step + 1], model, *control)
            judge(state_rows[here], lanes[here], *goal, possible, unstable)  # type: ignore[call-arg]
            made[lane] += 1
            if possible[lane] or unstable[lane]:
                break
