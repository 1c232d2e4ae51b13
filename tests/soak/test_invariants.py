"""The checks of the soak notice what they are there for: each is shown the fault that it has to find."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nightshift.adapters import mlflow_tracking
from nightshift.project import paths
from tests.cli.test_model_commands import MODEL, register_night
from tests.conftest import add_store, git, make_project
from tests.soak import invariants
from tests.soak.invariants import Inventory
from tests.soak.night import HANGS, WEIGHTS, Ended

TRACEBACK = "Traceback (most recent call last)\n  …\nKeyError: 'a'\n"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, migrated_store: Path) -> Path:
    """A project with a champion, cached results and runs that have ended."""
    root = make_project(tmp_path_factory.mktemp("soak") / "project")
    add_store(root, migrated_store)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root / paths.MLFLOW_DATABASE}")
        register_night(root, 1, "s" * 10)
    cached = root / ".dvc/cache/files/md5/ab/cdef"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(b"an episode")
    for path in WEIGHTS:
        (root / path).parent.mkdir(parents=True)
        (root / path).write_bytes(b"weights")
    prefect = root / paths.PREFECT_HOME / "prefect.db"
    prefect.parent.mkdir(parents=True)
    with sqlite3.connect(prefect) as connection:
        for table in ("flow_run", "task_run"):
            connection.execute(f"CREATE TABLE {table} (name TEXT, state_type TEXT, state_name TEXT)")
            connection.execute(f"INSERT INTO {table} VALUES ('calm-owl', 'COMPLETED', 'Cached')")
    return root


@pytest.fixture
def root(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "project", symlinks=True))


@pytest.fixture
def before(root: Path) -> Inventory:
    return invariants.take_inventory(root)


def every_check(root: Path, before: Inventory) -> Iterator[str]:
    yield from invariants.lost(root, before)
    yield from invariants.broken_registry(root)
    yield from invariants.left_running(root)
    yield from invariants.other_weights(root, {path.as_posix(): b"weights" for path in WEIGHTS})
    yield from invariants.left_processes(root, seconds=0.0)
    yield from invariants.left_files(root)


def damage_model(name: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        (found,) = (root / paths.MLFLOW_ARTIFACTS / "models").rglob(name)
        found.write_bytes(found.read_bytes() + b" ")

    return change


def delete_alias(root: Path) -> None:
    with invariants.local_store(root):
        mlflow_tracking.connect(root).delete_registered_model_alias(MODEL, "champion")


def execute(database: Path, statement: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        with sqlite3.connect(root / database) as connection:
            connection.execute(statement)

    return change


def rewrite_history(root: Path) -> None:
    git(root, "commit", "-q", "--amend", "-m", "another")


PREFECT = paths.PREFECT_HOME / "prefect.db"
DAMAGES: dict[str, Callable[[Path], object]] = {
    ".dvc/cache/files/md5/ab/cdef is gone": lambda root: (root / ".dvc/cache/files/md5/ab/cdef").unlink(),
    ".dvc/cache/files/md5/ab/cdef changed": lambda root: (root / ".dvc/cache/files/md5/ab/cdef").write_bytes(b"other"),
    "version 1 does not load: the policy.safetensors of version 1 of": damage_model("policy.safetensors"),
    "version 1 does not load: the policy.json of version 1 of": damage_model("policy.json"),
    "registered version 1 is gone": execute(paths.MLFLOW_DATABASE, "DELETE FROM model_versions"),
    "there is no champion": delete_alias,
    "alias champion points to version 7": execute(
        paths.MLFLOW_DATABASE, "UPDATE registered_model_aliases SET version = 7 WHERE alias = 'champion'"
    ),
    "is not in the history": rewrite_history,
    "MLflow run": execute(paths.MLFLOW_DATABASE, "UPDATE runs SET status = 'RUNNING'"),
    "Prefect flow run calm-owl is Running": execute(
        PREFECT, "UPDATE flow_run SET state_type = 'RUNNING', state_name = 'Running'"
    ),
    "Prefect task run calm-owl is Pending": execute(
        PREFECT, "UPDATE task_run SET state_type = 'PENDING', state_name = 'Pending'"
    ),
    "models/rloo/policy.safetensors is not what": lambda root: (root / WEIGHTS[1]).write_bytes(b"other"),
    ".dvc/.x.partial-1 was left": lambda root: (root / ".dvc" / ".x.partial-1").touch(),
}


def test_a_sound_project_passes_every_check(root: Path, before: Inventory) -> None:
    assert not list(every_check(root, before))
    assert before.versions.keys() == {"1"}
    assert any(path.endswith("policy.safetensors") for path in before.files)


@pytest.mark.parametrize("problem", DAMAGES)
def test_each_damage_is_noticed_and_named(root: Path, before: Inventory, problem: str) -> None:
    DAMAGES[problem](root)
    assert any(problem in found for found in every_check(root, before))


def test_a_process_that_stays_in_the_project_is_noticed(root: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], cwd=root, stdin=subprocess.PIPE) as process:
        assert list(invariants.left_processes(root, seconds=0.0))
        process.kill()
    assert not list(invariants.left_processes(root, seconds=10.0))


@pytest.mark.parametrize(
    ("ended", "refused", "is_fit"),
    [
        (Ended(0, "", ""), False, True),
        (Ended(130, "", "stopped; run again to resume\n"), False, True),
        (Ended(1, "", "error: no space left\n  → free some\n"), False, True),
        (Ended(1, "", "error: a conflict\n"), True, True),
        (Ended(0, "", ""), True, False),
        (Ended(1, "", ""), False, False),
        (Ended(-11, "", ""), False, False),
        (Ended(1, "", TRACEBACK + "error: it failed\n"), False, False),
        (Ended(0, "", TRACEBACK), False, False),
        (Ended(HANGS, "", "error: it hung\n"), False, False),
    ],
)
def test_a_run_ends_well_or_with_a_sentence_and_never_with_a_traceback(
    ended: Ended, refused: bool, is_fit: bool
) -> None:
    assert is_fit == (not list(invariants.unfit_end(ended, refused=refused, silent=False)))
