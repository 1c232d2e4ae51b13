"""Collecting demos: the scripted expert in processes that play whole episodes, in threads, and the fleet's own speed.

Control steps per second of the same episodes, played in turns in one run: `processes` is what the stage `collect` does
without Ray, with images drawn by one more process; `threads` plays many episodes at once in one process, with the
expert in others, as policies are played; `fleet` makes the same steps with the recorded actions, without expert and
images. Starting processes and building simulators counts. One JSON line; `ratio` is processes over threads.

Example: benchmarks/collect.py libero_spatial --states 8 --cameras agentview
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

# Python looks for modules beside the script first, where libero.py would pass for the package `libero`.
sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parent.resolve()]

from nightshift import config, envs
from nightshift.envs.base import Fleet
from nightshift.envs.protocols import DEFAULT
from nightshift.rollouts.engine import Engine, EngineSettings
from nightshift.rollouts.local import LocalPool
from nightshift.types import RolloutRequest, Trajectory

DISTURBANCE = 0.15
AT_ONCE = 3
"""Requests for each thread, as in the recipes for a GPU machine."""


def by_processes(env: config.Env, settings: EngineSettings, requests: Sequence[RolloutRequest]) -> list[Trajectory]:
    pool = LocalPool(env, settings)
    played = dict(pool.run(requests))
    pool.close()
    return [played[index][0] for index in range(len(requests))]


def by_threads(env: config.Env, settings: EngineSettings, requests: Sequence[RolloutRequest]) -> list[Trajectory]:
    engine = Engine(env, settings, envs.make_fleet)
    answers = [answer for turn in engine.play(deque(enumerate(requests)), None) for answer in turn]
    engine.close()
    played = {number: trajectories for number, trajectories, _ in answers if trajectories is not None}
    return [played[index][0] for index in range(len(requests))]


def by_fleet(env: config.Env, threads: int, episodes: Sequence[Trajectory]) -> None:
    """The steps of recorded episodes, task by task, in sibling fleets."""
    without = env.model_copy(update={"cameras": config.Cameras(names=(), size="auto", shadows=True)})
    for task in envs.tasks(without):
        chosen = [episode for episode in episodes if episode.request.task == task.name]
        first = envs.make_fleet(task, without)
        fleets = [first, *(first.sibling() for _ in chosen[1:])]
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(replay, fleets, chosen))
        for fleet in reversed(fleets):
            fleet.close()


def replay(fleet: Fleet, episode: Trajectory) -> None:
    fleet.reset(episode.request.split, [episode.request.init_state])
    fleet.advance(episode.executed[None], np.ones(1, np.bool_))


@contextlib.contextmanager
def timed(seconds: list[float], way: str) -> Iterator[None]:
    """Adds what it took, and says so: a run that is cut off has told something."""
    started = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - started)
    sys.stderr.write(f"{way}: {seconds[-1]:.1f} s\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite")
    parser.add_argument("--task", action="append", default=[], help="only this task; may be given more than once")
    parser.add_argument("--states", type=int, default=8, help="of each task")
    parser.add_argument("--cameras", nargs="*", default=[])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=1)
    chosen = parser.parse_args()
    cameras = config.Cameras(names=tuple(chosen.cameras), size="auto", shadows=True)
    tasks = tuple(chosen.task)
    env = config.Env(suite=chosen.suite, tasks=tasks, protocol=DEFAULT.name, horizon="auto", cameras=cameras)
    settings = EngineSettings(
        device=torch.device("cpu"), threads=chosen.threads, requests_at_once=AT_ONCE * chosen.threads
    )
    requests = [
        RolloutRequest(
            task=task.name, split="eval", init_state=state, controller="expert", seed=0, disturbance=DISTURBANCE
        )
        for task in envs.tasks(env)
        for state in range(chosen.states)
    ]
    seconds: dict[str, list[float]] = {"processes": [], "threads": [], "fleet": []}
    for _ in range(chosen.rounds):
        with timed(seconds["processes"], "processes"):
            episodes = by_processes(env, settings, requests)
        with timed(seconds["threads"], "threads"):
            others = by_threads(env, settings, requests)
        assert all(np.array_equal(a.executed, b.executed) for a, b in zip(episodes, others, strict=True))
        with timed(seconds["fleet"], "fleet"):
            by_fleet(env, chosen.threads, episodes)
    steps = sum(episode.length for episode in episodes)
    rates = {way: [steps / value for value in values] for way, values in seconds.items()}
    found = {way: round(statistics.median(values), 1) for way, values in rates.items()}
    ratios = [one / other for one, other in zip(rates["processes"], rates["threads"], strict=True)]
    print(
        json.dumps(
            {
                "suite": chosen.suite,
                "cameras": chosen.cameras,
                "cores": chosen.threads,
                "episodes": len(requests),
                "steps": steps,
                **found,
                "ratio": round(statistics.median(ratios), 2),
                "least": round(min(ratios), 2),
                "most": round(max(ratios), 2),
            }
        )
    )


if __name__ == "__main__":
    main()
