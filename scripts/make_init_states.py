"""Draws and freezes the init states of libero_mini: src/nightshift/envs/mini/init_states/<task>.npz.

The same seed gives the same states on the same machine; another CPU may differ in the last bits (about 1e-12 m).
Run it after changing a BDDL file or an object.
"""

from __future__ import annotations

import argparse
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from nightshift.envs.libero.drawing import draw
from nightshift.envs.mini.suite import LIBERO_MINI
from nightshift.types import Task

EVAL_STATES = 50
"""As many as LIBERO has: the grid to compare whole suites on."""
TRAIN_STATES = 200
MORE_EVAL_STATES = 200
"""Further held-out states, for narrower intervals on few tasks."""


def frozen(task: Task, seed: int, count: int) -> NDArray[np.float64]:
    """`count` different settled states [count, D] in which the task is not solved already."""
    env = LIBERO_MINI.make_env(task)
    states = np.stack([drawn.state for drawn in islice(draw(env, seed, known=()), count)])
    env.close()
    return states


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--task", action="append", help="only this task; may be given more than once")
    chosen = parser.parse_args()
    for task in LIBERO_MINI.tasks():
        if chosen.task and task.name not in chosen.task:
            continue
        states = frozen(task, chosen.seed, EVAL_STATES + TRAIN_STATES + MORE_EVAL_STATES)
        evaluation, training, more = np.split(states, [EVAL_STATES, EVAL_STATES + TRAIN_STATES])
        np.savez_compressed(LIBERO_MINI.init_states_file(task.name), eval=evaluation, train=training, more_eval=more)


if __name__ == "__main__":
    main()
