"""Control steps per second on one core: our compiled stepping against LIBERO's own `env.step`, same task, same actions.

One JSON line per task: {name, ours, peer, ratio}; each figure is the median over rounds that take turns.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import numpy as np

from nightshift.envs.libero import LiberoEnv, suite_tasks
from nightshift.policies.expert import Expert
from nightshift.types import Array

ROUNDS = 5


def recorded(env: LiberoEnv) -> list[Array]:
    """The expert's actions on the first training state."""
    expert, success = Expert(), False
    actions: list[Array] = []
    env.reset("train", 0)
    while not success and len(actions) < 100:  # noqa: PLR2004
        actions.append(expert.act(env.scene()))
        _, success = env.step(actions[-1])
    return actions


def steps_per_second(env: LiberoEnv, actions: list[Array]) -> float:
    env.reset("train", 0)
    started = time.perf_counter()
    for action in actions:
        env.step(action)
    return len(actions) / (time.perf_counter() - started)


def main() -> None:
    for task in suite_tasks("libero_mini"):
        ours, peer = LiberoEnv(task), LiberoEnv(task, compiled=False)
        actions = recorded(ours)
        rounds = np.array([(steps_per_second(ours, actions), steps_per_second(peer, actions)) for _ in range(ROUNDS)])
        figures = [statistics.median(column) for column in rounds.T]
        spread = [round(float(column.min()), 1) for column in rounds.T], [round(float(c.max()), 1) for c in rounds.T]
        line = {
            "name": f"stepping/{task.name}",
            "ours": round(figures[0], 1),
            "peer": round(figures[1], 1),
            "ratio": round(figures[0] / figures[1], 2),
            "least": spread[0],
            "most": spread[1],
        }
        sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
