"""A registered model in the simulator: loaded from MLflow alone, on held-out init states."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from nightshift import config, envs
from nightshift.adapters import mlflow_registry
from nightshift.envs.grid import misfit
from nightshift.errors import ConfigError, RolloutError
from nightshift.policies.snapshot import snapshot
from nightshift.project import paths
from nightshift.rollouts.opening import open_pool_for
from nightshift.stages.evaluate import grid
from nightshift.statistics.intervals import Rate
from nightshift.telemetry import progress

TOTAL = "all"


def predict(root: Path, which: str, task: str, episodes: int) -> dict[str, Rate]:
    """Success of the model behind an alias or version, by task and over all of them."""
    params = config.load(root / paths.PARAMS)
    env = _narrowed(params.env, task)
    _check_episodes(env, episodes)
    policy = mlflow_registry.load(root, params.section("register").model, which)
    if why := misfit(env, policy):
        raise ConfigError(f"model {which} cannot play here: {why}", "choose another, or edit env in params.yaml")
    requests = grid(env, episodes)
    played: Counter[str] = Counter()
    solved: Counter[str] = Counter()
    pool = open_pool_for(requests, params.machine, env)
    try:
        with progress.bar("predict", total=len(requests)) as advance:
            for _, (trajectory,) in pool.run(requests, snapshot(policy)):
                if trajectory.valid:
                    played.update((trajectory.request.task, TOTAL))
                    solved.update(dict.fromkeys((trajectory.request.task, TOTAL), int(trajectory.success)))
                advance(f"success {solved[TOTAL]}/{played[TOTAL]}")
    finally:
        pool.close()
    if not played:
        raise RolloutError(
            "the simulator failed in every episode", "set machine.workers to 0 in params.yaml to see its output"
        )
    return {name: Rate(solved[name], played[name]) for name in sorted(played, key=lambda name: (name == TOTAL, name))}


def _narrowed(env: config.Env, task: str) -> config.Env:
    if not task:
        return env
    if env.tasks and task not in env.tasks:
        raise ConfigError(f"params.yaml has no task {task!r} in env.tasks", f"choose one of {', '.join(env.tasks)}")
    return env.model_copy(update={"tasks": (task,)})


def _check_episodes(env: config.Env, episodes: int) -> None:
    """Each episode of a task has a held-out init state of its own."""
    task = min(envs.tasks(env), key=lambda task: envs.init_state_count(task, "eval"))
    available = envs.init_state_count(task, "eval")
    if episodes > available:
        raise ConfigError(
            f"--episodes is {episodes}, and {task.name} has {available} evaluation init states",
            f"--episodes {available}",
        )
