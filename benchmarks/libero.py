"""LIBERO's simulation: our fleet, LIBERO's `SubprocVectorEnv` and bare physics, on the same cores, in one run.

Control steps per second over SIMULATORS simulations of one scene, same init states, same actions, no cameras.
One JSON line per scene: {name, ours, peer, ratio, limit, of_limit, least, most}. `limit` is `mj_step` alone, 25 times a
control step; `ratio` is ours over the peer's. Figures are medians over rounds in which all three take turns.

With cameras: seconds per decision of a policy that renders once per chunk of 8 actions, against once per step.
`--plot FILE` draws throughput over the number of simulations per core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import mujoco
import numpy as np

# Python looks for modules beside the script first, where this very file would pass for the package `libero`.
sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parent.resolve()]

from nightshift.envs.libero.env import LiberoEnv, control_env
from nightshift.envs.libero.fleet import LiberoFleet
from nightshift.envs.libero.problem import ACTIONS
from nightshift.envs.libero.setup import prepare
from nightshift.envs.libero.suites import LIBERO_OBJECT, LIBERO_SPATIAL, LiberoSuite
from nightshift.envs.mini.suite import LIBERO_MINI
from nightshift.errors import SimulatorError
from nightshift.types import Array, Task

SUITES: tuple[LiberoSuite, ...] = (LIBERO_MINI, LIBERO_OBJECT, LIBERO_SPATIAL)
CORES = len(os.sched_getaffinity(0))
SIMULATORS = 4 * CORES
STEPS = 40
ROUNDS = 3
SUBSTEPS = 25
CHUNK = 8

Measure = Callable[[], float]


def actions(count: int) -> Array:
    """Gentle random moves [steps, count, A]."""
    return (0.3 * np.random.default_rng(0).standard_normal((STEPS, count, ACTIONS.size))).clip(-1, 1).astype(np.float32)


def rate(count: int, started: float) -> float:
    return STEPS * count / (time.perf_counter() - started)


class Ours:
    """Sibling fleets, one per core and thread, as a simulator process has them."""

    def __init__(self, suite: LiberoSuite, task: Task) -> None:
        self._first = suite.make_fleet(task)
        self._fleets = [self._first, *(self._first.sibling() for _ in range(CORES - 1))]
        self._pool = ThreadPoolExecutor(CORES)

    def __call__(self, count: int) -> float:
        lanes = np.array_split(np.arange(count), CORES)
        moves = actions(count)
        for fleet, part in zip(self._fleets, lanes, strict=True):
            fleet.reset("eval", (part % 50).tolist())
        started = time.perf_counter()
        list(self._pool.map(self._play, self._fleets, [moves[:, part] for part in lanes]))
        return rate(count, started)

    def _play(self, fleet: LiberoFleet, moves: Array) -> None:
        active = np.ones(moves.shape[1], np.bool_)
        for row in moves:
            fleet.step(row, active)

    def close(self) -> None:
        self._pool.shutdown()
        self._first.close()


class Peer:
    """LIBERO's vector environment: a process per simulation, its own `env.step`, its own observations."""

    def __init__(self, suite: LiberoSuite, task: Task, count: int) -> None:
        prepare()
        from libero.libero.envs.venv import SubprocVectorEnv

        self._states = suite.load_init_states(task, "eval")[np.arange(count) % 50]
        self._envs: Any = SubprocVectorEnv([partial(control_env, suite.problem(task))] * count)
        self._envs.reset()

    def __call__(self) -> float:
        count = len(self._states)
        self._envs.set_init_state(self._states)
        moves = actions(count)
        started = time.perf_counter()
        for row in moves:
            self._envs.step(row)
        return rate(count, started)

    def close(self) -> None:
        self._envs.close()


def limit(suite: LiberoSuite, task: Task, count: int) -> Measure:
    """`mj_step` and nothing else, from the same states, one thread per core. The arm is limp."""
    env = suite.make_env(task)
    lanes = [env, *(env.with_new_data() for _ in range(count - 1))]
    pool = ThreadPoolExecutor(CORES)

    def step(lane: LiberoEnv) -> None:
        mujoco.mj_step(lane._model, lane._data, STEPS * SUBSTEPS)

    def measure() -> float:
        for index, lane in enumerate(lanes):
            lane.reset("eval", index % 50)
        started = time.perf_counter()
        list(pool.map(step, lanes))
        return rate(count, started)

    return measure


def scene(suite: LiberoSuite) -> dict[str, Any]:
    task = suite.tasks()[0]
    ours, peer, bare = Ours(suite, task), Peer(suite, task, SIMULATORS), limit(suite, task, SIMULATORS)
    ours(SIMULATORS)  # compiles
    rounds = np.array([(ours(SIMULATORS), peer(), bare()) for _ in range(ROUNDS)])
    peer.close()
    ours.close()
    mine, theirs, most = (statistics.median(column) for column in rounds.T)
    return {
        "name": suite.name,
        "ours": round(mine),
        "peer": round(theirs),
        "ratio": round(mine / theirs, 2),
        "limit": round(most),
        "of_limit": round(mine / most, 2),
        "least": [round(column.min()) for column in rounds.T],
        "most": [round(column.max()) for column in rounds.T],
        "task": task.name,
        "simulations": SIMULATORS,
        "cores": CORES,
    }


def cameras(suite: LiberoSuite) -> dict[str, Any] | None:
    """Seconds per decision: eight control steps and one image, against eight steps and eight images."""
    env = suite.make_env(suite.tasks()[0])
    env.reset("eval", 0)
    if env.render() is None:
        return None
    moves = actions(1)[:, 0]

    def decision(images: int) -> float:
        env.reset("eval", 0)
        started = time.perf_counter()
        for index, action in enumerate(moves[:CHUNK]):
            if index < images:
                env.render()
            env.step(action)
        return time.perf_counter() - started

    rounds = np.array([(decision(1), decision(CHUNK)) for _ in range(ROUNDS)])
    mine, theirs = (statistics.median(column) for column in rounds.T)
    return {
        "name": f"{suite.name}/cameras",
        "ours": round(mine, 3),
        "peer": round(theirs, 3),
        "ratio": round(theirs / mine, 2),
        "frames_saved": CHUNK,
    }


def plot(path: Path) -> None:
    """Throughput of one fleet over the number of simulations per core."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    per_core = [1, 2, 4, 8, 16]
    for suite in available():
        ours = Ours(suite, suite.tasks()[0])
        ours(CORES)
        rates = [statistics.median(ours(CORES * n) for _ in range(ROUNDS)) for n in per_core]
        axes.plot(per_core, rates, marker="o", label=suite.name)
        ours.close()
    axes.set(xlabel="simulations per core", ylabel=f"control steps/s on {CORES} cores", xscale="log", ylim=0)
    axes.set_xticks(per_core, [str(n) for n in per_core])
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def available() -> list[LiberoSuite]:
    """Suites whose assets are there; the others are named on stderr."""
    found = []
    for suite in SUITES:
        try:
            suite.make_env(suite.tasks()[0])
        except SimulatorError as error:
            sys.stderr.write(f"{suite.name} is left out: {error}\n")
        else:
            found.append(suite)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, help="draw throughput over simulations per core instead")
    chosen = parser.parse_args()
    if chosen.plot:
        plot(chosen.plot)
        return
    suites = available()
    for line in (*map(scene, suites), *map(cameras, suites)):
        if line:
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
