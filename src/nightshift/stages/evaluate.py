"""Evaluate: play a fixed grid of held-out init states, each once, with every candidate.

The champion plays too where the stage `champion` found that it has not played this grid.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nightshift import config, envs, files, policies
from nightshift.config import CHAMPION
from nightshift.envs.grid import cells, conditions, digest
from nightshift.errors import RolloutError
from nightshift.pipeline.job import Job
from nightshift.policies.base import Policy
from nightshift.policies.snapshot import snapshot
from nightshift.project import paths
from nightshift.reports import figures, gate
from nightshift.reports.candidates import Candidate, Opponent, candidates, read_opponent
from nightshift.statistics.intervals import Rate
from nightshift.statistics.paired import Cell, EpisodeOutcome, Paired, solved
from nightshift.telemetry import progress
from nightshift.telemetry.metric_names import candidate_success
from nightshift.types import RolloutRequest, Trajectory

_FRAME_EVERY = 4


def run(job: Job, *, env: config.Env, evaluate: config.Evaluate) -> None:
    requests = grid(env, evaluate.init_states, evaluate.temperature)
    found = candidates(Path())
    loaded = [policies.load(candidate.folder) for candidate in found]
    outcomes: dict[str, list[EpisodeOutcome]] = {}
    for candidate, policy in zip(found, loaded, strict=True):
        film_frames = evaluate.film_frames if candidate is found[-1] else 0  # films show the most trained candidate
        outcomes[candidate.name] = _outcomes(job, env, requests, candidate.name, policy, film_frames)
    cameras = _cameras(env.suite, loaded)
    best = gate.best(gate.common_rates(outcomes))
    opponent = read_opponent(Path())
    if opponent:
        outcomes[CHAMPION] = _outcomes(job, env, requests, CHAMPION, policies.load(opponent.folder), 0)
    report: dict[str, Any] = {
        "grid": {"digest": digest(env, evaluate, cameras), "suite": env.suite, "episodes": len(requests)},
        "conditions": conditions(env, evaluate, cameras),
        "best": best,
        "candidates": _results(found, outcomes),
        CHAMPION: _champion(opponent, outcomes, best) if opponent else None,
    }
    with files.new_folder(paths.EVALUATION) as folder:
        files.write_json(folder / paths.EVALUATION_REPORT.name, report)
        files.write_json(folder / paths.EVALUATION_OUTCOMES.name, outcomes)
        figures.evaluation(folder / paths.EVALUATION_FIGURE.name, report, found)
        for film in _films(job).glob("*.*"):
            (folder / film.name).write_bytes(film.read_bytes())
    rates = {candidate_success(result["name"]): result["overall"]["rate"] for result in report["candidates"]}
    job.tracker.log(rates, step=0)
    job.tracker.artifact(paths.EVALUATION)


def grid(env: config.Env, init_states: config.CountOrAuto, temperature: float = 0.0) -> list[RolloutRequest]:
    """Every task on its first held-out states; greedy at temperature 0."""
    return [
        RolloutRequest(
            task=task,
            split="eval",
            init_state=state,
            controller="sample" if temperature else "greedy",
            seed=state,
            temperature=temperature,
        )
        for task, state in cells(env, init_states)
    ]


def _cameras(suite: str, loaded: Collection[Policy]) -> list[str]:
    """The suite's cameras that are an input of any of the policies."""
    return [camera for camera in envs.suite(suite).cameras if any(camera in policy.observations for policy in loaded)]


def _outcomes(
    job: Job, env: config.Env, requests: Sequence[RolloutRequest], name: str, policy: Policy, film_frames: int
) -> list[EpisodeOutcome]:
    """One outcome per request, in grid order. Valid episodes in the journal of a killed run are not played again."""
    journal = job.state / f"{name}.jsonl"
    known: dict[Cell, EpisodeOutcome] = {
        (o["task"], o["init_state"]): o for o in files.read_journal(journal) if o["valid"]
    }
    todo = [r for r in requests if (r.task, r.init_state) not in known]
    cameras = _cameras(env.suite, [policy])
    if film_frames and not cameras:
        todo = [replace(r, frames_every=_FRAME_EVERY) if r.init_state == 0 else r for r in todo]
    with progress.bar(f"eval {name}", total=len(requests), done=len(known)) as advance:
        for _, (trajectory,) in job.pool(env).run(todo, snapshot(policy)) if todo else ():
            request = trajectory.request
            frames = _frames(trajectory, cameras) if film_frames and request.init_state == 0 else None
            if frames is not None:
                frame_steps = trajectory.chunk if cameras else _FRAME_EVERY
                figures.film(_films(job), request.task, frames, frame_steps=frame_steps, strip_frames=film_frames)
            outcome: EpisodeOutcome = {
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


def _frames(trajectory: Trajectory, cameras: Sequence[str]) -> NDArray[np.uint8] | None:
    """The episode [F, H, W, 3] as the policy saw it, its cameras side by side; else as it was drawn for people.

    Both end with the final image, which shows the success.
    """
    if not trajectory.valid or not cameras:
        return trajectory.frames
    seen = [np.concatenate([trajectory.observations[one], trajectory.final[one][None]]) for one in cameras]
    return np.concatenate(seen, axis=2)


def _results(found: Sequence[Candidate], outcomes: Mapping[str, Sequence[EpisodeOutcome]]) -> list[dict[str, Any]]:
    """A summary per candidate, with its paired gain over the first."""
    first, *others = found
    cells = {name: solved(episodes) for name, episodes in outcomes.items()}
    gains = {other.name: Paired.between(cells[other.name], cells[first.name]).to_json() for other in others}
    return [{"name": c.name, "label": c.label, **_summary(outcomes[c.name]), "gain": gains.get(c.name)} for c in found]


def _champion(opponent: Opponent, outcomes: Mapping[str, Sequence[EpisodeOutcome]], best: str) -> dict[str, Any]:
    """The champion on the same grid, and the paired gain of the best candidate over it."""
    gain = Paired.between(solved(outcomes[best]), solved(outcomes[CHAMPION])).to_json()
    identity = {"name": CHAMPION, "version": opponent.version, "weights": opponent.weights}
    return {**identity, **_summary(outcomes[CHAMPION]), "best_gain": gain}


def _summary(outcomes: Sequence[EpisodeOutcome]) -> dict[str, Any]:
    """Rates are of valid episodes: one whose simulator failed does not count against the policy."""
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


def _rate(outcomes: Sequence[EpisodeOutcome]) -> Rate:
    valid = [o for o in outcomes if o["valid"]]
    if not valid:
        raise RolloutError(
            f"the simulator failed in every episode of {outcomes[0]['task']}",
            "run again: invalid episodes are played again; machine.workers 0 in params.yaml shows the output",
        )
    return Rate(sum(o["success"] for o in valid), len(valid))


def _films(job: Job) -> Path:
    folder = job.state / "films"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
