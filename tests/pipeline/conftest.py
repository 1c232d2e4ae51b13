"""A project whose stages have all run, which takes longer than most tests of it; they take copies."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from nightshift.pipeline import run
from nightshift.pipeline.run import Session
from nightshift.project import paths
from tests.conftest import add_store, edit, git, make_project

STAGES = [
    *("states", "collect", "dataset", "start", "sft", "choose", "rloo", "rlpd", "opponent", "evaluate", "register")
]


def every(status: str) -> dict[str, str]:
    """Of every stage but the training stage that `params.yaml` does not choose."""
    return dict.fromkeys(STAGES, status) | {"start": "skipped", "rlpd": "skipped"}


def ensure_all(root: Path) -> dict[str, str]:
    with Session(root) as session:
        return {stage: run.ensure(stage, session).status for stage in STAGES}


def enter(root: Path, patch: pytest.MonkeyPatch) -> None:
    patch.chdir(root)
    patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root / paths.MLFLOW_DATABASE}")


def copied(project: Path, root: Path) -> Path:
    shutil.copytree(project, root, symlinks=True)
    return root


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, migrated_store: Path) -> Path:
    """A project whose stages have all run, in this process. No test changes it."""
    root = make_project(tmp_path_factory.mktemp("finished") / "project")
    add_store(root, migrated_store)
    edit(root, "sft", steps=20)
    edit(root, "rloo", iterations=1)
    edit(root, "evaluate", init_states=2)
    git(root, "commit", "-qam", "smaller")
    with pytest.MonkeyPatch.context() as patch:
        enter(root, patch)
        assert ensure_all(root) == every("ran")
    return root
