"""Evaluate: play a fixed grid of held-out init states, each once, with the policy before and after RL."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nightshift import config, envs, files, policies
from nightshift.envs import protocols
from nightshift.errors import RolloutError, SimulatorError
from nightshift.pipeline.job import Job
from nightshift.policies.base import Policy
from nightshift.policies.snapshot import snapshot
from nightshift.project import paths
from nightshift.reports import figures
from nightshift.reports.intervals import Rate
from nightshift.telemetry import progress
from nightshift.types import RolloutRequest

OUTCOMES = "outcomes.json"
_FRAME_EVERY = 4

Outcome = dict[str, Any]
"""One episode: task, init_state, success, length, valid."""


def run(job: Job, *, env: config.Env, evaluate: config.Evaluate) -> None:
    requests = grid(env, evaluate.init_states, evaluate.temperature)
    candidates = {"sft": _load(paths.SFT_POLICY), "rloo": _load(paths.RLOO_POLICY)}
    cameras = _cameras(env.suite, candidates.values())
    conditions = {**envs.conditions(env, cameras), "temperature": evaluate.temperature}
    outcomes = {name: _outcomes(job, env, requests, name, policy, evaluate) for name, policy in candidates.items()}
    report: dict[str, Any] = {
        "grid": {"digest": _digest(env, requests, conditions), "suite": env.suite, "episodes": len(requests)},
        "conditions": conditions,
        "policies": {name: _summary(episodes) for name, episodes in outcomes.items()},
    }
    with files.new_folder(paths.EVALUATION) as folder:
        files.write_json(folder / paths.EVALUATION_REPORT.name, report)
        files.write_json(folder / OUTCOMES, outcomes)
        figures.evaluation(folder / paths.EVALUATION_FIGURE.name, report, json.loads(paths.RLOO_HISTORY.read_text()))
        for film in _films(job).glob("*.*"):
            (folder / film.name).write_bytes(film.read_bytes())
    for name, result in report["policies"].items():
        job.tracker.log({f"success/{name}": result["overall"]["rate"]}, step=0)
    job.tracker.artifact(paths.EVALUATION)


def grid(env: config.Env, init_states: config.CountOrAuto, temperature: float = 0.0) -> list[RolloutRequest]:
    """Every task on its first held-out states. At temperature 0 the policy takes the action it holds best."""
    requests = []
    if init_states == "auto":
        init_states = protocols.find(env.protocol).trials
    for task in envs.tasks(env):
        available = envs.init_state_count(task, "eval")
        if init_states > available:
            raise SimulatorError(
                f"{task.name} has {available} evaluation init states, {init_states} are asked for",
                "lower evaluate.init_states in params.yaml",
            )
        requests += [
            RolloutRequest(
                task=task.name,
                split="eval",
                init_state=state,
                controller="sample" if temperature else "greedy",
                seed=state,
                temperature=temperature,
            )
            for state in range(init_states)
        ]
    return requests


def _cameras(suite: str, candidates: Collection[Policy]) -> list[str]:
    """The suite's cameras that are an input of any of the policies."""
    return [
        camera for camera in envs.suite(suite).cameras if any(camera in policy.spec["inputs"] for policy in candidates)
    ]


def _load(folder: Path) -> Policy:
    files.verify_folder(folder, f"rm -r {folder} and run again")
    return policies.load(folder)


def _outcomes(
    job: Job, env: config.Env, requests: Sequence[RolloutRequest], name: str, policy: Policy, evaluate: config.Evaluate
) -> list[Outcome]:
    """One outcome per request, in grid order; those that a killed run had finished are not played again, unless the
    simulator failed."""
    journal = job.state / f"{name}.jsonl"
    known = {(o["task"], o["init_state"]): o for o in files.read_journal(journal) if o["valid"]}
    todo = [r for r in requests if (r.task, r.init_state) not in known]
    if name == "rloo" and evaluate.film_frames:
        todo = [replace(r, frames_every=_FRAME_EVERY) if r.init_state == 0 else r for r in todo]
    with progress.bar(f"eval {name}", total=len(requests), done=len(known)) as advance:
        for _, (trajectory,) in job.pool(env).run(todo, snapshot(policy)) if todo else ():
            request = trajectory.request
            if trajectory.valid and trajectory.frames is not None:
                figures.film(_films(job), request.task, trajectory.frames, evaluate.film_frames)
            outcome = {
                "task": request.task,
                "init_state": request.init_state,
                "success": trajectory.success,
                "length": trajectory.length,
                "valid": trajectory.valid,
            }
            known[request.task, request.init_state] = outcome
            files.append_json(journal, outcome)
            valid = [o["success"] for o in known.values() if o["valid"]]
            advance(f"{sum(valid)} of {len(valid)} solved")
    return [known[r.task, r.init_state] for r in requests]


def _summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """An episode whose simulator failed is no failure of the policy: it is counted apart."""
    tasks = list(dict.fromkeys(o["task"] for o in outcomes))
    return {
        "overall": _rate(outcomes).to_json(),
        "invalid": sum(not o["valid"] for o in outcomes),
        "tasks": {task: _rate([o for o in outcomes if o["task"] == task]).to_json() for task in tasks},
        "episode_length": {
            task: {
                "median_of_successes": float(np.median(lengths)) if lengths else None,
                "longest_success": max(lengths, default=None),
            }
            for task in tasks
            for lengths in [[o["length"] for o in outcomes if o["task"] == task and o["success"]]]
        },
    }


def _rate(outcomes: Sequence[Outcome]) -> Rate:
    valid = [o for o in outcomes if o["valid"]]
    if not valid:
        raise RolloutError(
            f"the simulator failed in every episode of {outcomes[0]['task']}",
            "run again: they are played again; machine.workers 0 in params.yaml shows its output",
        )
    return Rate(sum(o["success"] for o in valid), len(valid))


def _digest(env: config.Env, requests: Sequence[RolloutRequest], conditions: Mapping[str, Any]) -> str:
    """Two evaluations may be compared exactly when they played the same states under the same conditions."""
    cells = [(r.task, r.init_state) for r in requests]
    states = {task.name: envs.init_states_digest(task, "eval") for task in envs.tasks(env)}
    content = [env.suite, cells, states, conditions]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _films(job: Job) -> Path:
    folder = job.state / "films"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
