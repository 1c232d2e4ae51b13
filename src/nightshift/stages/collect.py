"""Collect demos: the scripted expert plays, and its successes are kept with their provenance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Literal

import numpy as np

from nightshift import config, envs, files
from nightshift.data import episode
from nightshift.data.episode_store import SCHEMA, EpisodeStore
from nightshift.envs.splits import check_demo_states, split_training_states
from nightshift.errors import SimulatorError
from nightshift.pipeline.job import Job
from nightshift.project import paths
from nightshift.rollouts.provenance import provenance
from nightshift.telemetry import progress
from nightshift.types import RolloutRequest, Task

Result = Literal["solved", "failed", "invalid"]
"""Invalid: the simulator failed, not the expert. The attempt is spent all the same, and another state is tried."""


def run(job: Job, *, seed: int, env: config.Env, states: config.States, collect: config.Collect) -> None:
    tasks = envs.tasks(env)
    splits = {task.name: split_training_states(task, states) for task in tasks}
    check_demo_states(splits, collect)
    candidates = {task.name: _candidates(task, splits[task.name].train, seed, collect) for task in tasks}
    missing = dict.fromkeys(splits, collect.demos_per_task)
    invalid: Counter[str] = Counter()
    kept: list[str] = []
    space = envs.suite(env.suite).action_space
    drafts = EpisodeStore(job.state / "episodes", ranges={"actions": (space.low, space.high)})
    with progress.bar("collect", total=sum(missing.values())) as advance:
        while any(missing.values()):
            requests = _next_round(candidates, missing, invalid, seed, collect.disturbance)
            for request, result in _play(job, env, tasks, requests, drafts):
                invalid[request.task] += result == "invalid"
                if result == "solved":
                    kept.append(_key(request))
                    missing[request.task] -= 1
                    advance(f"{request.task}{_spent(invalid.total())}")
    with files.new_folder(paths.DEMOS) as demos:
        for path in (drafts.folder / SCHEMA, *map(drafts.path, kept)):
            files.link_or_copy(path, demos / path.name)


def _candidates(task: Task, states: Sequence[int], seed: int, collect: config.Collect) -> Iterator[int]:
    """The task's training states in random order, as many as may be tried."""
    order = np.random.default_rng([seed, task.index]).permutation(states)
    return iter(order[: collect.demos_per_task * collect.attempts].tolist())


def _next_round(
    candidates: Mapping[str, Iterator[int]],
    missing: Mapping[str, int],
    invalid: Mapping[str, int],
    seed: int,
    disturbance: float,
) -> list[RolloutRequest]:
    """As many untried states of each task as it lacks demos."""
    requests = []
    for task, count in missing.items():
        states = list(islice(candidates[task], count))
        if len(states) < count:
            raise SimulatorError(
                f"the expert failed too often on {task}: {count} demos are missing and all attempts are used"
                f"{_spent(invalid[task])}",
                "raise collect.attempts in params.yaml, or states.per_task if every state was tried, "
                "or env.horizon if the episodes end before the task is done",
            )
        requests += [
            RolloutRequest(
                task=task, split="train", init_state=state, controller="expert", seed=seed, disturbance=disturbance
            )
            for state in states
        ]
    return requests


def _spent(invalid: int) -> str:
    return f", {invalid} attempts lost to the simulator" if invalid else ""


def _play(
    job: Job, env: config.Env, tasks: Sequence[Task], requests: Sequence[RolloutRequest], drafts: EpisodeStore
) -> Iterator[tuple[RolloutRequest, Result]]:
    """Each request and how it went. A success is on disk before it counts, so a killed run keeps it."""
    todo = []
    for request in requests:
        if _key(request) in drafts:
            yield request, "solved"
        else:
            todo.append(request)
    for index, (trajectory,) in job.pool(env).run(todo) if todo else ():
        if not trajectory.valid:
            yield todo[index], "invalid"
            continue
        if trajectory.success:
            demo = episode.from_trajectory(trajectory, provenance(trajectory.request, tasks, job.commit))
            drafts.put(_key(todo[index]), demo)
        yield todo[index], "solved" if trajectory.success else "failed"


def _key(request: RolloutRequest) -> str:
    return f"{request.task}-{request.init_state:04d}"
