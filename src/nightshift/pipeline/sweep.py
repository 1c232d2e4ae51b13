"""Several runs with other numbers, side by side: each in a clone of the project that shares DVC's cache and MLflow.

A trial ends with its evaluation and registers nothing: which numbers are best is for a person to see. Stages that the
numbers do not concern are restored from the shared cache. `python -m nightshift.pipeline.sweep` in a clone is a trial.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nightshift import config, files
from nightshift.errors import ConfigError
from nightshift.pipeline.run import Session, ensure
from nightshift.project import paths, repository
from nightshift.statistics.intervals import Rate

SWEEPS = paths.STATE / "sweep"
LOG = "trial.log"
LAST_STAGE = "evaluate"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Example: Trial(number=3, values={"sft.steps": 300}, folder=Path(".state/sweep/3"))"""

    number: int
    values: Mapping[str, Any]
    """The params that differ from params.yaml, by dotted name."""
    folder: Path

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
        found[name] = [_number(value) for value in values]
    return found


def trials(root: Path, choices: Mapping[str, Sequence[Any]], sample: int, seed: int) -> list[Trial]:
    """Every combination, or a random sample of them. ConfigError before anything runs if one is not valid."""
    combined = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    if sample and sample < len(combined):
        combined = random.Random(seed).sample(combined, sample)
    found = [
        Trial(number=number, values=values, folder=root / SWEEPS / str(number))
        for number, values in enumerate(combined, start=1)
    ]
    for trial in found:
        config.validate(_params(root, trial), Path(f"{paths.PARAMS} with {trial.title}"))
    return found


def run(root: Path, chosen: Sequence[Trial], jobs: int) -> Iterator[Outcome]:
    """Run the trials, so many at a time; outcomes come in the order of the trials."""
    for trial in chosen:
        _prepare(root, trial)
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda trial: _run(root, trial), chosen)


def _number(value: Any) -> Any:
    """YAML reads 1e-3 as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _params(root: Path, trial: Trial) -> dict[str, Any]:
    params: dict[str, Any] = yaml.safe_load((root / paths.PARAMS).read_text())
    for name, value in trial.values.items():
        *sections, last = name.split(".")
        section: Any = params
        for part in sections:
            section = section.get(part) if isinstance(section, dict) else None
        if not isinstance(section, dict) or last not in section:
            raise ConfigError(f"{paths.PARAMS} has no parameter {name}", "docs/parameters.md lists them")
        section[last] = value
    return params


def _prepare(root: Path, trial: Trial) -> None:
    """A clone of the project at its commit, with other params. One that is there already is used again: it resumes."""
    from nightshift.adapters.dvc_store import DvcStore

    if not trial.folder.exists():
        trial.folder.parent.mkdir(parents=True, exist_ok=True)
        repository.git(root, "clone", "--quiet", str(root), str(trial.folder))
        if not (trial.folder / ".venv").exists():
            (trial.folder / ".venv").symlink_to(root / ".venv")
        for pointer in sorted((root / paths.IMPORTS).glob("*.dvc")):
            files.replace_by_copy(pointer, trial.folder / pointer.relative_to(root))
        with contextlib.closing(DvcStore(trial.folder)) as store:
            store.share_cache(DvcStore(root))
            store.check_out()
    files.write_bytes(trial.folder / paths.PARAMS, yaml.safe_dump(_params(root, trial), sort_keys=False).encode())


def _run(root: Path, trial: Trial) -> Outcome:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(trial.folder / "src"), str(trial.folder)])}
    command = [sys.executable, "-m", "nightshift.pipeline.sweep"]
    with (trial.folder.parent / f"{trial.number}-{LOG}").open("w+") as log:
        ended = subprocess.run(command, cwd=trial.folder, env=environment, stdout=log, stderr=log, check=False)
        log.seek(0)
        said = log.read().strip().splitlines()
    if ended.returncode:
        return Outcome(trial=trial, success=None, error=said[-1] if said else f"exit code {ended.returncode}")
    report = json.loads((trial.folder / paths.EVALUATION_REPORT).read_text())
    overall = next(c["overall"] for c in report["candidates"] if c["name"] == report["best"])
    return Outcome(trial=trial, success=Rate(overall["successes"], overall["episodes"]), error="")


def main() -> None:
    """A trial, in the folder it is started in."""
    from nightshift.project import environment

    environment.apply(Path.cwd())
    with Session(Path.cwd(), kind="trial") as session:
        names = list(session.graph)
        for stage in names[: names.index(LAST_STAGE) + 1]:
            ensure(stage, session)


if __name__ == "__main__":
    main()
