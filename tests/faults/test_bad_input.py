"""What a user gets wrong is answered by a sentence and the next command, with an exit code and nothing half-written."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from nightshift.errors import ProjectError
from nightshift.project import repository as projects
from tests.conftest import add_store, edit, git, make_project, nightshift


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("bad") / "project")


def refused(root: Path, *arguments: str) -> str:
    """The sentence on stderr of a command that must fail cleanly."""
    done = nightshift(root, *arguments)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "→" in done.stderr, "every error says what to do next"
    assert not list(root.rglob("*.partial-*"))
    return done.stderr


def test_no_git_repository(tmp_path: Path) -> None:
    root = make_project(tmp_path / "project")
    shutil.rmtree(root / ".git")
    message = refused(root, "run")
    assert "is not a git repository" in message
    assert "git init" in message


def test_a_git_repository_without_a_commit(tmp_path: Path) -> None:
    root = make_project(tmp_path / "project")
    shutil.rmtree(root / ".git")
    git(root, "init", "-q")
    assert "has no commit yet" in refused(root, "plan")


def test_a_folder_that_is_no_project(tmp_path: Path) -> None:
    assert "not inside a Nightshift project" in refused(tmp_path, "run")


def test_commands_work_from_a_subfolder(root: Path) -> None:
    assert nightshift(root / "src", "plan").returncode == 0


def test_missing_params(root: Path) -> None:
    kept = (root / "params.yaml").read_text()
    (root / "params.yaml").unlink()
    message = refused(root, "run")
    (root / "params.yaml").write_text(kept)
    assert "params.yaml does not exist" in message
    assert "git checkout -- params.yaml" in message


CONFLICT = "<<<<<<< HEAD\nseed: 1\n=======\nseed: 2\n>>>>>>> theirs\n"


@pytest.mark.parametrize(
    ("name", "content", "sentence", "remedy"),
    [
        ("params.yaml", CONFLICT, "unresolved git conflict in line 1", "git checkout --ours -- params.yaml"),
        (
            "params.yaml",
            "seed: 0\nrloo:\n  clip: 1\n  clip: 2\n",
            "the key 'clip' twice, in lines 3 and 4",
            "remove one",
        ),
        ("params.yaml", "seed: [0\n", "is not valid YAML", "mend the line"),
        ("dvc.lock", CONFLICT, "unresolved git conflict in line 1", "git checkout -- dvc.lock"),
        ("dvc.lock", "schema: '2.0'\nstages:\n  states: {\n", "is not valid YAML", "git checkout -- dvc.lock"),
        ("dvc.lock", "", "is damaged", "git checkout -- dvc.lock"),
        ("dvc.yaml", CONFLICT, "unresolved git conflict in line 1", "git checkout --ours -- dvc.yaml"),
        (".dvc/config", CONFLICT, "unresolved git conflict in line 1", "git checkout --ours -- .dvc/config"),
        (
            "data/imports/goal.dvc",
            f"outs:\n{CONFLICT}",
            "unresolved git conflict in line 2",
            "git checkout --ours -- data/imports/goal.dvc",
        ),
    ],
)
def test_damaged_and_conflicted_files_are_named_with_the_line(
    root: Path, name: str, content: str, sentence: str, remedy: str
) -> None:
    kept = (root / name).read_text() if (root / name).exists() else None
    (root / name).write_text(content)
    message = refused(root, "plan")
    (root / name).unlink() if kept is None else (root / name).write_text(kept)
    assert name in message
    assert sentence in message
    assert remedy in message
    assert len(message.strip().splitlines()) == 2, "one sentence, and what to do"


def test_unknown_and_ill_typed_keys_are_listed_together(root: Path) -> None:
    kept = (root / "params.yaml").read_text()
    edit(root, "rloo", learning_rat=1, temperature="wide")
    message = refused(root, "run")
    (root / "params.yaml").write_text(kept)
    assert "2 problems" in message
    assert "rloo.learning_rat: unknown key" in message
    assert "rloo.temperature" in message


def test_an_unknown_stage(root: Path) -> None:
    assert "there is no stage 'colect'" in refused(root, "stage", "colect")


@pytest.mark.parametrize("command", ["ui", "serve"])
def test_a_port_in_use(root: Path, command: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = refused(root, command, "--port", str(port))
    assert f"port {port} is in use" in message
    assert f"--port {port + 1}" in message


def test_a_project_that_dvc_is_working_in(root: Path) -> None:
    program = "from dvc.repo import Repo; import sys\nwith Repo('.').lock: print('held', flush=True); sys.stdin.read()"
    python = root / ".venv/bin/python"
    holder = subprocess.Popen([python, "-c", program], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout and holder.stdin
    holder.stdout.readline()
    message = refused(root, "plan")
    assert holder.poll() is None, "the command does not wait for the other one"
    holder.stdin.close()
    holder.wait()
    holder.stdout.close()
    assert "another DVC command is working in this project" in message


def test_a_model_that_is_not_there(root: Path, migrated_store: Path) -> None:
    add_store(root, migrated_store)
    assert "nightshift run" in refused(root, "predict", "--model", "champion")


@pytest.mark.parametrize("command", [("predict",), ("stage", "states"), ("gc",)])
def test_an_mlflow_server_that_does_not_answer(root: Path, command: tuple[str, ...]) -> None:
    (root / ".state" / "sft" / "0123").mkdir(parents=True, exist_ok=True)  # for gc to look at
    kept = {"MLFLOW_TRACKING_URI": "http://user:s3cret@127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
    done = nightshift(root, *command, **kept)
    assert done.returncode == 1
    assert done.stderr.endswith(
        "error: MLflow at http://127.0.0.1:9 does not answer\n"
        "  → start it, or check MLFLOW_TRACKING_URI, and run again: what is done is kept\n"
    )


def test_a_folder_that_cannot_be_written(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(projects.tempfile, "NamedTemporaryFile", denied)  # type: ignore[attr-defined]
    with pytest.raises(ProjectError, match="cannot be written: Permission denied"):
        projects.check(root)


def test_the_commit_is_marked_when_tracked_files_differ_from_it(root: Path) -> None:
    clean = projects.commit(root)
    kept = (root / "params.yaml").read_text()
    (root / "dvc.lock").write_text("schema: '2.0'\n")
    assert projects.commit(root) == clean, "dvc.lock is written by every run"
    (root / "dvc.lock").unlink()
    edit(root, "sft", steps=9)
    assert projects.commit(root) == f"{clean}+"
    (root / "params.yaml").write_text(kept)
