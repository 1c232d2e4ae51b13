"""Plays the scripted expert on a suite's init states and prints a markdown table, one row per task.

Episodes are played side by side, by processes of their own. With --episodes every finished episode becomes a line of a
file, and a sweep with the same file plays only what is missing there, or has ended with an error: take another file for
other code.

Example: scripts/expert_sweep.py libero_object --jobs 16 --episodes sweep.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from nightshift import config, envs, spawning
from nightshift.envs import registry
from nightshift.envs.base import Fleet
from nightshift.envs.protocols import DEFAULT
from nightshift.errors import NightshiftError
from nightshift.policies.expert import goals
from nightshift.rollouts.experts import decide
from nightshift.rollouts.rollout import GroupPlay, Observer
from nightshift.types import RolloutRequest, Split, Task, Trajectory

HORIZON = 100
"""Control steps for a suite that the protocol has no number for."""
NO_CAMERAS = config.Cameras(names=(), size="auto", shadows=True)
HEADER = "| task | solved | steps, median / most | init states not solved |\n|---|---|---|---|\n"


@dataclass(frozen=True, kw_only=True)
class Start:
    """What an episode depends on, beside the code."""

    suite: str
    task: str
    split: Split
    init_state: int
    disturbance: float


@dataclass(frozen=True, kw_only=True)
class Played:
    """One episode."""

    start: Start
    solved: bool
    steps: int
    reason: str
    """Why it is not solved: the goal that was worked on last, or the error that ended it."""

    @property
    def is_error(self) -> bool:
        return self.steps == 0

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def of_line(cls, line: str) -> Played:
        fields = json.loads(line)
        return cls(**{**fields, "start": Start(**fields["start"])})


def environment(suite: str, tasks: Sequence[str]) -> config.Env:
    is_published = set(envs.suite(suite).benchmarks()) <= set(DEFAULT.max_steps)
    horizon: config.CountOrAuto = "auto" if is_published else HORIZON
    return config.Env(suite=suite, tasks=tuple(tasks), protocol=DEFAULT.name, horizon=horizon, cameras=NO_CAMERAS)


@lru_cache(maxsize=1)
def fleet_of(suite: str, name: str) -> Fleet:
    """Of the last task alone: the simulators of a whole suite take gigabytes."""
    env = environment(suite, [name])
    (task,) = envs.tasks(env)
    return envs.make_fleet(task, env)


def play(start: Start) -> Played:
    try:
        return _play(start, fleet_of(start.suite, start.task))
    except (NightshiftError, ValueError) as error:  # the simulator's or the expert's; the other episodes are played
        fleet_of.cache_clear()
        return Played(start=start, solved=False, steps=0, reason=f"{type(error).__name__}: {error}")


def _play(start: Start, fleet: Fleet) -> Played:
    request = RolloutRequest(
        task=start.task,
        split=start.split,
        init_state=start.init_state,
        controller="expert",
        seed=0,
        disturbance=start.disturbance,
    )
    horizon = envs.horizon(environment(start.suite, [start.task]), fleet.task)
    group = GroupPlay(request, fleet, Observer(None, ()), horizon, lambda: None, partial(decide, start.suite))
    group.reset()
    group.see()
    while not group.done:
        group.advance()
        group.see()
    (episode,) = group.trajectories(version=0)
    return Played(start=start, solved=episode.success, steps=episode.length, reason=reason(fleet, episode))


def reason(fleet: Fleet, episode: Trajectory) -> str:
    if episode.success:
        return ""
    if episode.unstable:
        return "unstable physics"
    goal, _ = goals.current(fleet.scene(0))
    return " ".join(goal)


def row(name: str, episodes: Sequence[Played]) -> str:
    steps = [episode.steps for episode in episodes if episode.solved]
    lengths = f"{np.median(steps):.0f} / {max(steps)}" if steps else ""
    unsolved: defaultdict[str, list[int]] = defaultdict(list)
    for episode in episodes:
        if not episode.solved:
            unsolved[episode.reason].append(episode.start.init_state)
    reasons = "; ".join(f"{', '.join(map(str, sorted(states)))} ({why})" for why, states in unsolved.items())
    return f"| {name} | {len(steps)} of {len(episodes)} | {lengths} | {reasons} |\n"


def finished(path: Path | None) -> dict[Start, Played]:
    """Of an earlier sweep. One that was killed may have left half a line, which is cut off."""
    if path is None or not path.exists():
        return {}
    lines = path.read_text().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    if whole != lines:
        path.write_text("".join(whole))
    return {episode.start: episode for episode in map(Played.of_line, whole)}


def sweep(starts: Sequence[Start], jobs: int, path: Path | None) -> Iterator[Played]:
    """As they end. Those of the file come first; the others are added to it."""
    done = finished(path)
    yield from (done[start] for start in starts if start in done)
    with spawning.processes(jobs) as processes:
        for future in as_completed([processes.submit(play, start) for start in starts if start not in done]):
            episode = future.result()
            if path is not None and not episode.is_error:
                with path.open("a") as file:
                    file.write(episode.line())
            yield episode


def starts_of(task: Task, chosen: argparse.Namespace) -> list[Start]:
    count = min(chosen.states, envs.init_state_count(task, chosen.split))
    return [
        Start(suite=task.suite, task=task.name, split=chosen.split, init_state=state, disturbance=chosen.disturbance)
        for state in range(count)
    ]


def arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=registry.names())
    parser.add_argument("--task", action="append", default=[], help="only this task; may be given more than once")
    parser.add_argument("--split", choices=("eval", "train"), default="eval")
    parser.add_argument("--states", type=int, default=50, help="the first so many init states of each task")
    parser.add_argument("--disturbance", type=float, default=0.0, help="noise on the actions, as collect.disturbance")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that play")
    parser.add_argument("--episodes", type=Path, help="a file of finished episodes, which grows with every episode")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> None:
    chosen = arguments(words)
    envs.suite(chosen.suite).assets()  # an error now, and not in every episode
    tasks = {task.name: starts_of(task, chosen) for task in envs.tasks(environment(chosen.suite, chosen.task))}
    by_task: defaultdict[str, list[Played]] = defaultdict(list)
    sys.stdout.write(HEADER)
    for episode in sweep([start for starts in tasks.values() for start in starts], chosen.jobs, chosen.episodes):
        name = episode.start.task
        by_task[name].append(episode)
        if len(by_task[name]) == len(tasks[name]):
            sys.stdout.write(row(f"`{name}`", by_task[name]))
            sys.stdout.flush()
    sys.stdout.write(row("all", [episode for episodes in by_task.values() for episode in episodes]))


if __name__ == "__main__":
    main(sys.argv[1:])
