"""Freeze the init states: what a suite ships is noted, what it lacks for training is drawn.

data/init_states/  index.json              every task: how many states per split, from where, their sha256
                   <suite>/<task>.npz      train [N, D] and the seeds [N] of the samplers, where they were drawn
                   manifest.json           sha256 of each file, written last
"""

from __future__ import annotations

import hashlib
import io
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nightshift import config, envs, files
from nightshift.envs import protocols
from nightshift.envs.base import DrawnState
from nightshift.pipeline.job import Job
from nightshift.project import paths
from nightshift.telemetry import progress
from nightshift.types import Task

INDEX = "index.json"
_SAVE_EVERY = 20
"""States between two writes of a draft: a second's work."""


def run(job: Job, *, seed: int, env: config.Env, states: config.States) -> None:
    tasks = envs.tasks(env)
    envs.horizon(env)  # of all stages this one runs first, so a horizon that does not resolve is refused here
    drafts = {task.name: job.state / f"{task.name}.npz" for task in tasks if envs.lacks_train_states(task)}
    if drafts:
        _draw_missing(env, drafts, seed, states.per_task)
    with files.new_folder(paths.INIT_STATES) as folder:
        if drafts:
            (folder / env.suite).mkdir()
        for name, draft in drafts.items():
            shutil.copyfile(draft, folder / env.suite / f"{name}.npz")
        entries = {task.name: _entry(task, drafts.get(task.name)) for task in tasks}
        files.write_json(folder / INDEX, {"suite": env.suite, "tasks": entries, "versions": envs.versions(env.suite)})


def _draw_missing(env: config.Env, drafts: Mapping[str, Path], seed: int, wanted: int) -> None:
    """Fill every draft. A killed run leaves what it has drawn, and the next goes on from there to the same states."""
    kept = {name: _read(path) for name, path in drafts.items()}
    with progress.bar("states", total=wanted * len(kept), done=sum(map(len, kept.values()))) as advance:
        for task in envs.tasks(env):
            drawn = kept[task.name]
            for one in islice(_more(task, env.protocol, seed, tuple(drawn)), wanted - len(drawn)):
                drawn.append(one)
                if len(drawn) % _SAVE_EVERY == 0 or len(drawn) == wanted:
                    _write(drafts[task.name], drawn)
                advance(task.name)


def _more(task: Task, protocol: str, seed: int, drawn: Sequence[DrawnState]) -> Iterator[DrawnState]:
    """The states that follow `drawn`; the simulator is built when the first one is asked for."""
    return envs.suite(task.suite).draw_train_states(task, protocols.find(protocol), seed, drawn)


def _write(path: Path, drawn: Sequence[DrawnState]) -> None:
    content = io.BytesIO()
    np.savez_compressed(
        content,
        train=np.stack([one.state for one in drawn]),
        seeds=np.array([one.seed for one in drawn], dtype=np.uint64),
        attempts=np.array([one.attempt for one in drawn], dtype=np.uint64),
    )
    files.write_bytes(path, content.getvalue())


def _read(path: Path) -> list[DrawnState]:
    if not path.exists():
        return []
    with np.load(path, allow_pickle=False) as arrays:
        columns = arrays["train"], arrays["seeds"].tolist(), arrays["attempts"].tolist()
    return [DrawnState(*row) for row in zip(*columns, strict=True)]


def _entry(task: Task, draft: Path | None) -> dict[str, Any]:
    held_out = {
        "count": envs.init_state_count(task, "eval"),
        "sha256": envs.init_states_digest(task, "eval"),
        "from": "shipped",
    }
    if draft is None:
        count, digest = envs.init_state_count(task, "train"), envs.init_states_digest(task, "train")
        return {"eval": held_out, "train": {"count": count, "sha256": digest, "from": "shipped"}}
    train: NDArray[np.float64] = np.stack([one.state for one in _read(draft)])
    digest = hashlib.sha256(train.tobytes()).hexdigest()
    return {"eval": held_out, "train": {"count": len(train), "sha256": digest, "from": "drawn"}}
