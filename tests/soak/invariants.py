"""What must hold after every night, whatever happened to it."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from nightshift import config, files
from nightshift.adapters import mlflow_registry, mlflow_tracking, model_versions
from nightshift.errors import NightshiftError
from nightshift.project import environment, paths
from tests.conftest import git
from tests.faults.test_interrupt import inhabitants
from tests.soak.night import HANGS, Ended, weights

KEPT = (".dvc/cache/files", f"{paths.MLFLOW_ARTIFACTS}/models", str(paths.IMPORTS))
"""Where results lie that are never removed or changed: of stages, registered models, imports."""
AGENT_SECONDS = 90.0
"""Agents of Ray wait up to a minute for a head that was killed."""


@dataclass(frozen=True)
class Inventory:
    """What a project has that must not get lost."""

    files: Mapping[str, str]
    """sha256 by path."""
    versions: Mapping[str, str]
    """sha256 of the weights by number of the registered version."""
    commit: str


def take_inventory(root: Path) -> Inventory:
    found = {
        path.relative_to(root).as_posix(): files.sha256(path)
        for folder in KEPT
        for path in sorted((root / folder).rglob("*"))
        if path.is_file() and not path.name.endswith(".tmp")
    }
    with local_store(root):
        versions = {version.version: version.weights for version in model_versions.versions(root, _model(root))}
    return Inventory(found, versions, git(root, "rev-parse", "HEAD").strip())


def lost(root: Path, before: Inventory) -> Iterator[str]:
    """Whatever was there and is gone or changed."""
    now = take_inventory(root)
    for path, digest in before.files.items():
        if now.files.get(path) != digest:
            yield f"{path} {'changed' if path in now.files else 'is gone'}"
    for version, digest in before.versions.items():
        if now.versions.get(version) != digest:
            yield f"registered version {version} {'changed' if version in now.versions else 'is gone'}"
    kept = subprocess.run(["git", "merge-base", "--is-ancestor", before.commit, now.commit], cwd=root, check=False)
    if kept.returncode:
        yield f"commit {before.commit} is not in the history"


def broken_registry(root: Path) -> Iterator[str]:
    """Versions that do not load, and aliases without a version; a champion there must be."""
    model = _model(root)
    with local_store(root):
        numbers = [version.version for version in model_versions.versions(root, model)]
        for number in numbers:
            try:
                mlflow_registry.load(root, model, number)
            except NightshiftError as error:
                yield f"version {number} does not load: {error.what}"
        aliases = mlflow_registry.aliases(mlflow_tracking.connect(root), model)
    for alias, number in aliases.items():
        if number not in numbers:
            yield f"alias {alias} points to version {number}, which does not exist"
    if config.CHAMPION not in aliases:
        yield "there is no champion"


def left_running(root: Path) -> Iterator[str]:
    """Runs that MLflow or Prefect show as running although nothing runs."""
    for what, database, query in (
        ("MLflow run", paths.MLFLOW_DATABASE, "SELECT name, status FROM runs WHERE status = 'RUNNING'"),
        ("Prefect flow run", paths.PREFECT_HOME / "prefect.db", _open_runs("flow_run")),
        ("Prefect task run", paths.PREFECT_HOME / "prefect.db", _open_runs("task_run")),
    ):
        with contextlib.closing(sqlite3.connect(root / database)) as connection:
            for name, state in connection.execute(query):
                yield f"{what} {name} is {state}"


def _open_runs(table: str) -> str:
    return (
        f"SELECT name, state_name FROM {table} WHERE state_type NOT IN ('COMPLETED', 'FAILED', 'CRASHED', 'CANCELLED')"
    )


def other_weights(root: Path, expected: Mapping[str, bytes]) -> Iterator[str]:
    found = weights(root)
    for path, content in expected.items():
        if found[path] != content:
            yield f"{path} is not what an undisturbed run makes"


def left_processes(root: Path, seconds: float = AGENT_SECONDS) -> Iterator[str]:
    deadline = time.monotonic() + seconds
    while (left := inhabitants(root)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for line in left:
        yield f"still running: {line[:120]}"


def left_files(root: Path) -> Iterator[str]:
    for path in root.rglob("*.partial-*"):
        yield f"{path.relative_to(root)} was left"


def unfit_end(ended: Ended, *, refused: bool, silent: bool) -> Iterator[str]:
    """A disturbed run succeeds, or is dead, or says in a sentence what is wrong; it never prints a traceback."""
    if silent:
        return
    if "Traceback (most recent call last)" in ended.errors:
        yield f"traceback: {ended.errors.strip().splitlines()[-1][:200]}"
    if ended.code == HANGS:
        yield ended.sentence
    if refused and ended.code == 0:
        yield "the run succeeded, and had to be refused"
    if ended.code not in (0, 130) and not ended.sentence:
        yield f"exit code {ended.code} without a sentence: {ended.errors.strip()[-200:]}"


def unfit_next(ended: Ended) -> Iterator[str]:
    """A run that nothing disturbs succeeds: the next one, and one whose fault was missed."""
    if ended.code:
        yield f"a run failed that was not disturbed ({ended.code}): {ended.errors.strip()[-400:]}"


def unfit_prediction(ended: Ended) -> Iterator[str]:
    if ended.code:
        yield f"the champion does not play: {ended.errors.strip()[-400:]}"


@contextlib.contextmanager
def local_store(root: Path) -> Iterator[None]:
    """MLflow's store of this project, for this process."""
    store = {"MLFLOW_TRACKING_URI": f"sqlite:///{root / paths.MLFLOW_DATABASE}"}
    with mock.patch.dict(os.environ, environment.NO_TELEMETRY | environment.SAFE | environment.QUIET | store):
        yield


def _model(root: Path) -> str:
    name: str = config.load(root / paths.PARAMS).section("register").model
    return name
