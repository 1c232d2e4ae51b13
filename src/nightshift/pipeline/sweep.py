"""Several runs with other numbers, side by side: each in a clone of the project that shares DVC's cache and MLflow.

A trial ends with its evaluation and registers nothing: which numbers are best is for a person to see. Stages that the
numbers do not concern are restored from the shared cache. `python -m nightshift.pipeline.sweep` in a clone is a trial.
On one machine trials are processes; on a Ray cluster a task starts the process of each on a node with room for it.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

from nightshift import config, files, interrupts
from nightshift.cluster.program import ADDRESS_VARIABLE, STARTED_BY, Program
from nightshift.errors import Busy, ConfigError, NightshiftError
from nightshift.pipeline.run import Session, ensure, fingerprint, publish
from nightshift.project import locks, paths, repository
from nightshift.project.environment import TRACKING_URI
from nightshift.statistics.intervals import Rate

LOG = "trial.log"
LAST_STAGE = "evaluate"
TITLE = "NIGHTSHIFT_TRIAL"
"""Environment variable of a trial: what its run in MLflow is called."""
_SOURCE = "src"
_ENVIRONMENT = ".venv"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Example: Trial(number=3, values={"sft.steps": 300}, folder=Path(".state/sweep/0123456789ab/3"))"""

    number: int
    values: Mapping[str, Any]
    """The params that differ from params.yaml, by dotted name."""
    folder: Path

    @property
    def commit(self) -> str:
        """The commit that its clone is made of: the clones of a sweep are in a folder of that name."""
        return self.folder.parent.name

    @property
    def title(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.values.items())


@dataclass(frozen=True, kw_only=True)
class Outcome:
    trial: Trial
    success: Rate | None
    """Of its best candidate; None if it failed."""
    error: str
    """The last line that a failed trial said."""
    run_id: str = ""
    """Its run in MLflow."""


def parse(choices: Sequence[str]) -> dict[str, list[Any]]:
    """["sft.steps=100,200"] as {"sft.steps": [100, 200]}; values are YAML, and 1e-3 is a number."""
    found: dict[str, list[Any]] = {}
    for choice in choices:
        name, equals, text = choice.partition("=")
        try:
            values = yaml.safe_load(f"[{text}]") if equals and text else []
        except yaml.YAMLError:
            values = []
        if not values:
            raise ConfigError(f"{choice!r} is no choice of values", "write NAME=VALUE,VALUE, as in sft.steps=100,200")
        if name in found:
            raise ConfigError(f"{name} is given twice", f"write all of its values at once: {name}=VALUE,VALUE")
        found[name] = [_number(value) for value in values]
    return found


def trials(root: Path, choices: Mapping[str, Sequence[Any]], sample: int, seed: int) -> list[Trial]:
    """Every combination, or a random sample of them. ConfigError before anything runs if one is not valid."""
    _check_names(root, choices)
    combined = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    if sample and sample < len(combined):
        combined = random.Random(seed).sample(combined, sample)
    folder = root / paths.SWEEPS / _head(root)  # a clone is used again for the commit it was made of, and for no other
    found = [
        Trial(number=number, values=values, folder=folder / str(number))
        for number, values in enumerate(combined, start=1)
    ]
    for trial in found:
        config.validate(params_of(root, trial), Path(f"{paths.PARAMS} with {trial.title}"))
    return found


def uncommitted(root: Path) -> str:
    """Changes of the code that no trial sees, in one sentence; empty if there are none."""
    changed = repository.git(root, "status", "--porcelain", "--", str(paths.DVC_YAML), _SOURCE)
    if not changed:
        return ""
    return f"the trials run the code of commit {_head(root)}: {len(changed.splitlines())} changed files are not in it"


def run(root: Path, chosen: Sequence[Trial], jobs: int) -> Generator[Outcome]:
    """Run the trials, so many at a time; outcomes come in the order of the trials. Closing it ends those that run.

    With 0 jobs one at a time on this machine, and on a cluster as many as it has room for.
    """
    busy = locks.held(root / paths.SWEEP_LOCK, _busy)  # two would work in the same clones
    with busy, contextlib.closing(_processes(root)) as processes:
        for trial in chosen:
            _prepare(root, trial)
        at_once = jobs or (1 if isinstance(processes, LocalProcesses) else len(chosen))
        with ThreadPoolExecutor(at_once) as pool:
            try:
                yield from pool.map(lambda trial: _run(trial, processes), chosen)
            except BaseException:
                processes.stop()
                raise


class Processes(Protocol):
    """Where trials run."""

    def call(self, program: Program) -> int:
        """Start a process and wait for its exit code."""
        ...

    def stop(self) -> None:
        """End those that run and begin no other."""
        ...

    def close(self) -> None: ...


class LocalProcesses:
    """Each has a session of its own, so a signal reaches it once: from here."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stopped = threading.Event()

    def call(self, program: Program) -> int:
        with program.log.open("w") as log:
            process = subprocess.Popen(
                program.command,
                cwd=program.folder,
                env={**program.environment, STARTED_BY: str(os.getpid())},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._processes.append(process)
        if self._stopped.is_set():  # while it was being started
            process.terminate()
        return process.wait()

    def stop(self) -> None:
        self._stopped.set()
        for process in self._processes:
            process.terminate()

    def close(self) -> None:
        """Nothing is left: `call` waits."""


def _busy(holder: str) -> Busy:
    return Busy(f"another sweep (process {holder}) is running", f"kill {holder}")


def _processes(root: Path) -> Processes:
    """On the cluster at RAY_ADDRESS each takes the CPUs and GPUs of a run with this section `machine`."""
    if ADDRESS_VARIABLE not in os.environ:
        return LocalProcesses()
    from nightshift.cluster.processes import ClusterProcesses
    from nightshift.policies.device import resolve

    machine = config.load(root / paths.PARAMS).machine
    gpus = machine.ranks if resolve(machine.device).type == "cuda" else 0
    processes = ClusterProcesses(cpus=max(1, machine.workers * machine.threads), gpus=gpus)
    store = os.environ.get(TRACKING_URI, "")
    if len(processes.hosts) > 1 and not store.startswith("http"):
        processes.close()
        raise ConfigError(
            "a sweep over several machines needs an MLflow server: they cannot share a database file",
            "start one (mlflow server) and set MLFLOW_TRACKING_URI to its address",
        )
    return processes


def _head(root: Path) -> str:
    return repository.git(root, "rev-parse", "--short=12", "HEAD")


def _number(value: Any) -> Any:
    """YAML reads 1e-3 as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _check_names(root: Path, names: Iterable[str]) -> None:
    known = config.parameter_names(config.load(root / paths.PARAMS))
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise ConfigError(f"there is no parameter {name}", f"{hint}docs/parameters.md lists them all")


def params_of(root: Path, trial: Trial) -> dict[str, Any]:
    """A parameter may be in a section that params.yaml does not have."""
    params: dict[str, Any] = yaml.safe_load((root / paths.PARAMS).read_text())
    for name, value in trial.values.items():
        *sections, last = name.split(".")
        section = params
        for part in sections:
            section[part] = section.get(part) or {}
            if not isinstance(section[part], dict):
                raise ConfigError(
                    f"{part} is {section[part]!r}, which has no {last}", f"write {part} as a section first"
                )
            section = section[part]
        section[last] = value
    return params


def _prepare(root: Path, trial: Trial) -> None:
    """A clone of the project at its commit, with its imports and other params. One that is there already resumes."""
    from nightshift.adapters.dvc_store import DvcStore, cache_folder

    if not trial.folder.exists():
        repository.clone(root, trial.commit, trial.folder)
    if not os.path.lexists(trial.folder / _ENVIRONMENT):
        (trial.folder / _ENVIRONMENT).symlink_to(root / _ENVIRONMENT)
    _mirror_imports(root / paths.IMPORTS, trial.folder / paths.IMPORTS)
    with contextlib.closing(DvcStore(trial.folder)) as store:
        store.share_cache(cache_folder(root))
        store.check_out()
    params = yaml.safe_dump(params_of(root, trial), sort_keys=False).encode()
    if not _was_prepared(trial, params):
        (trial.folder / paths.TRIAL).unlink(missing_ok=True)  # it says that the clone's trial has ended
    files.write_bytes(trial.folder / paths.PARAMS, params)


def _was_prepared(trial: Trial, params: bytes) -> bool:
    """Whether the last trial in its clone was this one."""
    return (trial.folder / paths.PARAMS).read_bytes() == params


def _mirror_imports(source: Path, target: Path) -> None:
    """The same .dvc files as in the project; a check-out brings their data."""
    pointers = {pointer.name: pointer for pointer in source.glob("*.dvc")}
    for old in target.glob("*.dvc"):
        if old.name not in pointers:
            old.unlink()
            shutil.rmtree(old.with_suffix(""), ignore_errors=True)
    for name, pointer in pointers.items():
        files.replace_by_copy(pointer, target / name)


def _run(trial: Trial, processes: Processes) -> Outcome:
    log = trial.folder.parent / f"{trial.number}-{LOG}"
    sources = os.pathsep.join([str(trial.folder / _SOURCE), str(trial.folder)])
    inherited = {name: value for name, value in os.environ.items() if name != ADDRESS_VARIABLE}
    program = Program(
        command=[sys.executable, "-m", "nightshift.pipeline.sweep"],
        folder=trial.folder,
        environment={**inherited, "PYTHONPATH": sources, TITLE: trial.title},
        log=log,
    )
    try:
        code = processes.call(program)
    except NightshiftError as error:
        return Outcome(trial=trial, success=None, error=error.what)
    if code:
        said = log.read_text().strip().splitlines()
        return Outcome(trial=trial, success=None, error=said[-1] if said else f"exit code {code}")
    report = json.loads((trial.folder / paths.EVALUATION_REPORT).read_text())
    overall = next(c["overall"] for c in report["candidates"] if c["name"] == report["best"])
    run_id = json.loads((trial.folder / paths.TRIAL).read_text())["run_id"]
    return Outcome(trial=trial, success=Rate(overall["successes"], overall["episodes"]), error="", run_id=run_id)


def main() -> None:
    """A trial, in the folder it is started in."""
    from nightshift.project import environment

    interrupts.handle()
    interrupts.end_with(int(os.environ[STARTED_BY]))  # it may be gone by now, and getppid be another process
    environment.apply(Path.cwd())
    try:
        _play()
    except NightshiftError as error:
        sys.exit(f"{error}\n{' '.join(error.what.split())}")  # the last line is what the table of trials shows


def _play() -> None:
    with Session(Path.cwd(), kind="trial", title=os.environ.get(TITLE, "")) as session:
        names = list(session.graph)
        results = [ensure(stage, session) for stage in names[: names.index(LAST_STAGE) + 1]]
        _record(session, ran=results[-1].status == "ran")


def _record(session: Session, *, ran: bool) -> None:
    """Note the run in MLflow that has the result. A result from the cache gets one, too: it is one to compare."""
    key = {"title": os.environ.get(TITLE, ""), "fingerprint": fingerprint(LAST_STAGE, session)}
    known = json.loads(paths.TRIAL.read_text()) if paths.TRIAL.exists() else {}
    if not ran and {**known, **key} == known:
        return
    if not ran:
        publish(LAST_STAGE, session)
    files.write_json(paths.TRIAL, {**key, "run_id": session.tracking.parent_id})


if __name__ == "__main__":
    main()
