"""A run of the past in a folder of its own: its commit, its params.yaml and dvc.lock, and its data from DVC's cache."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nightshift.adapters import mlflow_tracking
from nightshift.adapters.dvc_store import DvcStore, cache_folder
from nightshift.errors import ProjectError
from nightshift.project import paths, repository

if TYPE_CHECKING:
    from nightshift.adapters.model_versions import PipelineRun


def check_out(root: Path, run: PipelineRun, folder: Path) -> Iterator[str]:
    """Make the folder; sentences say what is in it, what is not, and how to run it. Nothing is run here: the code of
    another commit needs an environment of its own."""
    commit = run.commit.removesuffix("+")
    _check(root, commit, folder)
    repository.clone(root, commit, folder)
    yield f"{folder} has the code of {commit}"
    if run.commit.endswith("+"):
        yield "its files had changes that were not committed: they are not in there"
    for name in (paths.PARAMS, paths.DVC_LOCK):
        if mlflow_tracking.download(root, run.run_id, name, folder):
            yield f"{name} is that of the run"
        else:
            yield f"the run has no {name} on record: it is that of the commit"
    _bring_data(root, folder)
    yield "its data came from DVC's cache; what the cache lacks will be made again"
    yield f"to run it: cd {folder} && make setup && .venv/bin/nightshift run"


def _check(root: Path, commit: str, folder: Path) -> None:
    if folder.exists():
        raise ProjectError(f"{folder} already exists", "--to another folder")
    try:
        repository.git(root, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")
    except subprocess.CalledProcessError:
        raise ProjectError(f"git has no commit {commit!r} here", "git fetch, from where the run was made") from None


def _bring_data(root: Path, folder: Path) -> None:
    """The outputs that dvc.lock names, from this project's cache."""
    with contextlib.closing(DvcStore(folder)) as store:
        store.share_cache(cache_folder(root))
        store.check_out()
