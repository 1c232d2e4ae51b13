"""Freeze the init states: what a suite ships is noted, what it lacks for training is drawn.

data/init_states/  index.json              every task: how many states per split, from where, their sha256
                   <suite>/<task>.npz      train [N, D] and the seeds [N] of the samplers, where they were drawn
                   manifest.json           sha256 of each file, written last
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import signal
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from ctypes import c_byte
from dataclasses import dataclass
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nightshift import config, envs, files, spawning
from nightshift.envs import protocols
from nightshift.envs.base import DrawnState
from nightshift.errors import SimulatorError
from nightshift.pipeline.job import Job
from nightshift.project import paths
from nightshift.telemetry import progress
from nightshift.types import Task

INDEX = "index.json"
_SAVE_EVERY = 20
"""States between two writes of a draft: a second's work."""


def run(job: Job, *, seed: int, env: config.Env, states: config.States) -> None:
    tasks = envs.tasks(env)
    envs.horizons(env)  # of all stages this one runs first, so a horizon that does not resolve is refused here
    draws = envs.suite(env.suite).draws_train_states
    drafts = {task.name: job.state / f"{task.name}.npz" for task in tasks} if draws else {}
    if drafts:
        _draw_missing(env, drafts, seed, states.per_task, job.machine)
    with files.new_folder(paths.INIT_STATES) as folder:
        if drafts:
            (folder / env.suite).mkdir()
        for name, draft in drafts.items():
            shutil.copyfile(draft, folder / env.suite / f"{name}.npz")
        entries = {task.name: _entry(task, drafts.get(task.name)) for task in tasks}
        files.write_json(folder / INDEX, {"suite": env.suite, "tasks": entries, "versions": envs.versions(env.suite)})


def _draw_missing(env: config.Env, drafts: Mapping[str, Path], seed: int, wanted: int, machine: config.Machine) -> None:
    """Fill every draft. A killed run leaves what it has drawn, and the next goes on from there to the same states."""
    missing = {name: wanted - len(_read(path)) for name, path in drafts.items()}
    draws = [_Draw(task, env.protocol, seed, drafts[task.name], wanted) for task in envs.tasks(env)]
    total = wanted * len(draws)
    with progress.bar("states", total=total, done=total - sum(missing.values())) as advance:
        for name in _drawn([draw for draw in draws if missing[draw.task.name]], missing, _processes(machine)):
            advance(name)


@dataclass(frozen=True)
class _Draw:
    """The states of one task, up to the number that is wanted."""

    task: Task
    protocol: str
    seed: int
    draft: Path
    wanted: int

    def run(self) -> Iterator[None]:
        """Yields after every state."""
        drawn = _read(self.draft)
        more = _more(self.task, self.protocol, self.seed, tuple(drawn))
        for one in islice(more, self.wanted - len(drawn)):
            drawn.append(one)
            if len(drawn) % _SAVE_EVERY == 0 or len(drawn) == self.wanted:
                _write(self.draft, drawn)
            yield


def _processes(machine: config.Machine) -> int:
    """As many as simulate in other stages, where this machine has the cores."""
    return min(max(machine.workers, 1) * machine.threads, os.cpu_count() or 1)


def _drawn(draws: Sequence[_Draw], missing: Mapping[str, int], processes: int) -> Iterator[str]:
    """The name of the task of every state that is drawn; from several processes when all of the task are."""
    if min(processes, len(draws)) > 1:
        for name in _drawn_side_by_side(draws, min(processes, len(draws))):
            yield from repeat(name, missing[name])
        return
    for draw in draws:
        yield from (draw.task.name for _ in draw.run())


def _drawn_side_by_side(draws: Sequence[_Draw], processes: int) -> Generator[str, None, None]:
    """LIBERO's samplers use numpy's global generator and hold the GIL: a process draws all states of a task."""
    stopped = spawning.context().RawValue("b", False)  # no lock, which a process that is killed would keep
    executor = spawning.processes(processes, _begin_drawing, stopped)
    try:
        drawing = {executor.submit(_draw_unless_stopped, draw): draw.task.name for draw in draws}
        for future in as_completed(drawing):
            future.result()
            yield drawing[future]
    except BrokenProcessPool as error:
        raise SimulatorError(
            "a process that draws init states died",
            "run again: what it has drawn is kept, and lower machine.threads if memory ran out",
        ) from error
    finally:
        stopped.value = True
        executor.shutdown(cancel_futures=True)


_stopped: c_byte
"""Of a process that draws: whether what it draws is no longer wanted."""


def _begin_drawing(stopped: c_byte) -> None:
    global _stopped  # noqa: PLW0603 - shared memory reaches a process of an executor this way alone
    _stopped = stopped
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides


def _draw_unless_stopped(draw: _Draw) -> None:
    if not _stopped.value:  # else a simulator would be built first
        for _ in draw.run():
            if _stopped.value:
                return


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
