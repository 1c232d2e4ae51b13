"""Evaluate: play a fixed grid of held-out init states, each once, with every candidate.

The champion plays too where the stage `opponent` found that it has not played this grid. Of players that are the same
policy, as where training kept the clone, the first plays for all. What a policy has played in an earlier evaluation,
in the same way, is not played again: when one policy is trained again, it plays alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats  # noqa: F401 - the intervals at the end need it: if it is not installed, that is told now
from numpy.typing import NDArray

from nightshift import config, envs, files, policies
from nightshift.config import CHAMPION, CHAMPION_LEFT_OUT
from nightshift.envs.grid import cameras_in, cells, conditions, digest, played_by
from nightshift.errors import RolloutError
from nightshift.pipeline.job import Job
from nightshift.policies.base import Policy
from nightshift.policies.snapshot import snapshot
from nightshift.project import paths, playing
from nightshift.reports import figures, films, gate, tables
from nightshift.reports.candidates import (
    Candidate,
    Opponent,
    candidates,
    first_with_same_policy,
    left_out,
    read_opponent,
)
from nightshift.reports.films import Film
from nightshift.statistics.intervals import Rate
from nightshift.statistics.paired import Cell, EpisodeOutcome, Paired, solved
from nightshift.telemetry import progress
from nightshift.telemetry.console import console
from nightshift.telemetry.metric_names import candidate_success
from nightshift.types import RolloutRequest, Trajectory

_BEGUN_AGAIN = "begun-again"
"""File in the folder of a forced evaluation that has forgotten what was played before: a second try goes on with what
the first one played."""


def run(job: Job, *, env: config.Env, evaluate: config.Evaluate) -> None:
    code, how = played_by(env), playing.evaluation(Path(), env, evaluate)  # before hours in which a file may be edited
    requests = grid(env, evaluate.init_states, evaluate.temperature)
    found, opponent = candidates(Path()), read_opponent(Path())
    players: dict[str, Candidate | Opponent] = {candidate.name: candidate for candidate in found}
    if opponent:
        players[CHAMPION] = opponent
    same = first_with_same_policy(players)
    acting = {name: policies.load(player.folder) for name, player in players.items() if same[name] == name}
    cameras = cameras_in(env, {seen for candidate in found for seen in acting[same[candidate.name]].observations})
    journals = _journals(job, env, how, {name: players[name].policy for name in acting})
    played = {name: _outcomes(job, env, requests, name, policy, journals[name]) for name, policy in acting.items()}
    outcomes = {name: played[first] for name, first in same.items()}
    summaries = {name: _summary(env, episodes) for name, episodes in outcomes.items()}
    best = gate.best(gate.common_rates({candidate.name: outcomes[candidate.name] for candidate in found}))
    report: dict[str, Any] = {
        "grid": {
            "digest": digest(env, evaluate, cameras),
            "code": code,
            "suite": env.suite,
            "episodes": len(requests),
        },
        "conditions": conditions(env, evaluate, cameras),
        "best": best,
        "candidates": _results(found, outcomes, summaries, same),
        CHAMPION: _champion(opponent, outcomes, best, same) | summaries[CHAMPION] if opponent else None,
        CHAMPION_LEFT_OUT: left_out(Path()),
    }
    filmed = _filmed(found, outcomes, best, evaluate.films)
    with files.new_folder(paths.EVALUATION) as folder:
        report["films"] = _film(job, env, [r for r in requests if (r.task, r.init_state) in filmed], acting, folder)
        files.write_json(folder / paths.EVALUATION_OUTCOMES.name, outcomes)
        _write(folder, report, found)
    rates = {candidate_success(result["name"]): result["overall"]["rate"] for result in report["candidates"]}
    job.tracker.log(rates, step=0)
    job.tracker.artifact(paths.EVALUATION)
    (job.state / _BEGUN_AGAIN).unlink(missing_ok=True)


def _write(folder: Path, report: Mapping[str, Any], found: Sequence[Candidate]) -> None:
    """The report, the tables of `dvc metrics` and `dvc plots`, and the figure."""
    files.write_json(folder / paths.EVALUATION_REPORT.name, report)
    files.write_json(folder / paths.EVALUATION_METRICS.name, tables.metrics(report))
    (folder / paths.EVALUATION_SUCCESS.name).write_text(tables.success(report))
    (folder / paths.EVALUATION_LEARNING.name).write_text(tables.learning(found))
    figures.evaluation(folder / paths.EVALUATION_FIGURE.name, report, found)


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


def _journals(job: Job, env: config.Env, how: str, players: Mapping[str, Mapping[str, str]]) -> dict[str, list[Path]]:
    """By player two files of the same episodes: one in the folder of this evaluation, with which it resumes here or on
    another node, and one of the policy, for later evaluations that play in the same way (`how`). A robot never plays
    the same episode twice, so there the second is left out."""
    shared = {name: [] if env.robot else [playing.journal(how, policy)] for name, policy in players.items()}
    journals = {name: [job.state / f"{name}.jsonl", *shared[name]] for name in players}
    if job.forced and not (job.state / _BEGUN_AGAIN).exists():
        for journal in chain.from_iterable(journals.values()):
            journal.unlink(missing_ok=True)
        files.write_bytes(job.state / _BEGUN_AGAIN, b"")
    return journals


def _known(name: str, journals: Sequence[Path]) -> dict[Cell, EpisodeOutcome]:
    """The valid episodes of all journals, each of which has all of them afterwards."""
    own, *others = [{_cell(o): o for o in files.read_journal(journal) if o["valid"]} for journal in journals]
    known: dict[Cell, EpisodeOutcome] = {cell: o for each in (*others, own) for cell, o in each.items()}
    if earlier := len(known) - len(own):
        console.print(f"{name}: {earlier} episodes were played in an earlier evaluation")
    for journal, has in zip(journals, (own, *others), strict=True):
        if len(has) < len(known):
            files.write_journal(journal, known.values())
    return known


def _cell(outcome: EpisodeOutcome) -> Cell:
    return outcome["task"], outcome["init_state"]


def _outcomes(
    job: Job,
    env: config.Env,
    requests: Sequence[RolloutRequest],
    name: str,
    policy: Policy,
    journals: Sequence[Path],
) -> list[EpisodeOutcome]:
    """One outcome per request, in grid order. Valid episodes in the journals are not played again."""
    known = _known(name, journals)
    todo = [r for r in requests if (r.task, r.init_state) not in known]
    with progress.bar(f"eval {name}", total=len(requests), done=len(known)) as advance:
        for _, (trajectory,) in job.pool(env).run(todo, snapshot(policy)) if todo else ():
            request = trajectory.request
            outcome: EpisodeOutcome = {
                "task": request.task,
                "init_state": request.init_state,
                "success": trajectory.success,
                "length": trajectory.length,
                "valid": trajectory.valid,
            }
            known[request.task, request.init_state] = outcome
            for journal in journals:
                files.append_json(journal, outcome)
            valid = [o["success"] for o in known.values() if o["valid"]]
            advance(f"{sum(valid)} of {len(valid)} solved")
    return [known[r.task, r.init_state] for r in requests]


def _filmed(
    found: Sequence[Candidate], outcomes: Mapping[str, Sequence[EpisodeOutcome]], best: str, count: int
) -> list[Cell]:
    """The init states to film. Where the clone is the best, those on which the last candidate differs from it."""
    clone, last = found[0].name, found[-1].name
    return films.choose(solved(outcomes[clone]), solved(outcomes[last if best == clone else best]), count)


def _film(
    job: Job, env: config.Env, requests: Sequence[RolloutRequest], acting: Mapping[str, Policy], folder: Path
) -> list[Film]:
    """Play these requests once more with every policy that acts, drawn at every control step, beside the images that
    the policy saw. Without a GL library: no films."""
    made: list[Film] = []
    if not requests:
        return made
    drawn = [replace(request, frames_every=1) for request in requests]
    rate = envs.suite(env.suite).control_hz
    (folder / paths.FILMS).mkdir()
    for name, policy in acting.items():
        for _, (trajectory,) in job.pool(env).run(drawn, snapshot(policy)):
            if trajectory.frames is None or not trajectory.valid:
                continue
            request = trajectory.request
            file = Path(paths.FILMS) / f"{request.task}-{request.init_state:04d}-{name}.mp4"
            views = [_seen(trajectory, camera) for camera in cameras_in(env, policy.observations)]
            films.write(folder / file, films.with_views(trajectory.frames, views, trajectory.chunk), rate)
            made.append(
                {
                    "task": request.task,
                    "init_state": request.init_state,
                    "candidate": name,
                    "success": trajectory.success,
                    "length": trajectory.length,
                    "file": file.as_posix(),
                }
            )
    return sorted(made, key=lambda film: film["file"])


def _seen(trajectory: Trajectory, camera: str) -> NDArray[np.uint8]:
    """Its images [D + 1, h, w, 3]: one per decision, and the last one."""
    return np.concatenate([trajectory.observations[camera], trajectory.final[camera][None]])


def _results(
    found: Sequence[Candidate],
    outcomes: Mapping[str, Sequence[EpisodeOutcome]],
    summaries: Mapping[str, Mapping[str, Any]],
    same: Mapping[str, str],
) -> list[dict[str, Any]]:
    """A summary per candidate, with its paired gain over the first."""
    first, *others = found
    cells = {name: solved(episodes) for name, episodes in outcomes.items()}
    gains = {other.name: Paired.between(cells[other.name], cells[first.name]).to_json() for other in others}
    return [
        {
            "name": c.name,
            "label": c.label,
            **_same_policy(c.name, same),
            **summaries[c.name],
            "gain": gains.get(c.name),
        }
        for c in found
    ]


def _champion(
    opponent: Opponent, outcomes: Mapping[str, Sequence[EpisodeOutcome]], best: str, same: Mapping[str, str]
) -> dict[str, Any]:
    """The champion on the same grid, and the paired gain of the best candidate over it."""
    gain = Paired.between(solved(outcomes[best]), solved(outcomes[CHAMPION])).to_json()
    facts = {"name": CHAMPION, "version": opponent.version, "weights": opponent.weights, "best_gain": gain}
    return {**facts, **_same_policy(CHAMPION, same)}


def _same_policy(name: str, same: Mapping[str, str]) -> dict[str, str | None]:
    """Who played in its place: what is said of their difference is not a measurement."""
    return {"same_policy_as": same[name] if same[name] != name else None}


def _summary(env: config.Env, outcomes: Sequence[EpisodeOutcome]) -> dict[str, Any]:
    """Rates are of valid episodes: one whose simulator failed does not count against the policy."""
    homes = {task.name: envs.suite(env.suite).benchmark(task) for task in envs.tasks(env)}
    tasks = list(dict.fromkeys(o["task"] for o in outcomes))
    suites = list(dict.fromkeys(homes[task] for task in tasks))
    return {
        "overall": _rate(outcomes).to_json(),
        "invalid": sum(not o["valid"] for o in outcomes),
        "suites": {
            suite: _rate([o for o in outcomes if homes[o["task"]] == suite]).to_json()
            for suite in (suites if len(suites) > 1 else ())
        },
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
