"""Plays the scripted expert on a suite's init states and prints a markdown table, one row per task.

Example: scripts/expert_sweep.py libero_object --states 50
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np

from nightshift import config, envs
from nightshift.envs import registry
from nightshift.envs.protocols import DEFAULT
from nightshift.rollouts.local import LocalPool
from nightshift.rollouts.pool import RayPool
from nightshift.types import RolloutRequest, Split, Task, Trajectory

HORIZON = 100
"""Control steps for a suite that the protocol has no number for."""
NO_CAMERAS = config.Cameras(names=(), size="auto", shadows=True)
HEADER = "| task | solved | episodes | steps, median / most | init states not solved |\n|---|---|---|---|---|\n"


def requests_for(task: Task, split: Split, states: int) -> list[RolloutRequest]:
    count = min(states, envs.init_state_count(task, split))
    return [
        RolloutRequest(task=task.name, split=split, init_state=state, controller="expert", seed=0)
        for state in range(count)
    ]


def row(task: Task, episodes: Sequence[Trajectory]) -> str:
    steps = [episode.length for episode in episodes if episode.success]
    lengths = f"{np.median(steps):.0f} / {max(steps)}" if steps else ""
    unsolved = ", ".join(str(episode.request.init_state) for episode in episodes if not episode.success)
    return f"| `{task.name}` | {len(steps)} | {len(episodes)} | {lengths} | {unsolved} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=registry.names())
    parser.add_argument("--task", action="append", default=[], help="only this task; may be given more than once")
    parser.add_argument("--split", choices=("eval", "train"), default="eval")
    parser.add_argument("--states", type=int, default=50, help="the first so many init states of each task")
    parser.add_argument("--workers", type=int, default=0, help="processes beside this one")
    chosen = parser.parse_args()
    horizon = DEFAULT.max_steps.get(chosen.suite, HORIZON)
    suite = config.Env(
        suite=chosen.suite, tasks=tuple(chosen.task), protocol=DEFAULT.name, horizon=horizon, cameras=NO_CAMERAS
    )
    tasks = envs.tasks(suite)
    sys.stdout.write(HEADER)
    for task in tasks:
        env = suite.model_copy(update={"tasks": (task.name,)})
        pool = RayPool(chosen.workers, env) if chosen.workers else LocalPool(env)
        played = sorted(pool.run(requests_for(task, chosen.split, chosen.states)), key=lambda result: result[0])
        pool.close()
        sys.stdout.write(row(task, [episode for _, episodes in played for episode in episodes]))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
