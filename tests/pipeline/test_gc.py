"""`nightshift gc` on a real MLflow store: what may be resumed or is registered stays, the rest goes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from nightshift import files
from nightshift.errors import CacheError, NightshiftError
from nightshift.pipeline import gc, run
from nightshift.pipeline.run import Session
from nightshift.project import locks, paths
from tests.conftest import add_store, git, make_project, nightshift

BYTES = 1000


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, migrated_store: Path) -> Path:
    root = make_project(tmp_path_factory.mktemp("gc") / "project")
    add_store(root, migrated_store)
    return root


@pytest.fixture
def folders(root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Checkpoints of sft, by what has become of them."""
    monkeypatch.chdir(root)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root / paths.MLFLOW_DATABASE}")
    with Session(root) as session:
        for fingerprint in ("killed", "failed", "finished"):
            leave_run(session, fingerprint * 4)
        current = run.fingerprint("sft", session)
    fingerprints = {name: name * 4 for name in ("killed", "failed", "finished", "unknown")} | {"current": current}
    made = {name: root / paths.stage_state("sft", fingerprint) for name, fingerprint in fingerprints.items()}
    for folder in made.values():
        (folder / "step-1").mkdir(parents=True, exist_ok=True)
        (folder / "step-1" / "tensors").write_bytes(b"x" * BYTES)
    return made


def leave_run(session: Session, fingerprint: str) -> None:
    """A run of sft that ended as its fingerprint says."""
    error = {"killed": KeyboardInterrupt, "failed": ValueError}.get(fingerprint[:6])
    try:
        with session.tracking.stage("sft", fingerprint, {}):
            if error:
                raise error
    except (KeyboardInterrupt, ValueError):
        pass


def there(folders: dict[str, Path]) -> set[str]:
    return {name for name, folder in folders.items() if folder.exists()}


def test_what_may_be_resumed_or_is_registered_stays_and_the_rest_goes(root: Path, folders: dict[str, Path]) -> None:
    metrics = root / paths.stage_metrics("sft", "finished" * 4)
    metrics.parent.mkdir(exist_ok=True)
    metrics.touch()
    found = gc.collect(root, dry_run=False, everything=False)
    assert there(folders) == {"current", "killed", "failed"}
    assert {root / each.path: each.size for each in found if not each.kept_for} == {
        folders["finished"]: BYTES,
        folders["unknown"]: BYTES,
    }
    assert metrics.exists(), "metrics are the record of what was trained"


def test_interrupted_runs_go_too_when_asked_for(root: Path, folders: dict[str, Path]) -> None:
    gc.collect(root, dry_run=False, everything=True)
    assert there(folders) == {"current"}


@pytest.fixture
def sweeps(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Path]]:
    """Clones of trials, by what has become of their sweep."""
    monkeypatch.chdir(root)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root / paths.MLFLOW_DATABASE}")
    head = git(root, "rev-parse", "--short=12", "HEAD").strip()
    made = {name: root / paths.SWEEPS / commit for name, commit in {"current": head, "done": "d0", "cut": "c0"}.items()}
    for name, folder in made.items():
        for number in ("1", "2"):
            (folder / number).mkdir(parents=True)
            (folder / number / "data").write_bytes(b"x" * BYTES)
            (folder / number / ".venv").symlink_to(root / ".venv")
            if (name, number) != ("cut", "2"):
                files.write_json(folder / number / paths.TRIAL, {})
    yield made
    shutil.rmtree(root / paths.SWEEPS)


def test_clones_of_finished_sweeps_of_other_commits_go_and_what_they_link_to_stays(
    root: Path, sweeps: dict[str, Path]
) -> None:
    found = {found.path.name: found for found in gc.collect(root, dry_run=True, everything=False)}
    assert there(sweeps) == set(sweeps)
    assert 2 * BYTES <= found["d0"].size < 3 * BYTES
    assert (found["c0"].kept_for, found[sweeps["current"].name].kept_for) == (gc.UNFINISHED, gc.CURRENT)
    gc.collect(root, dry_run=False, everything=False)
    assert there(sweeps) == {"current", "cut"}
    gc.collect(root, dry_run=False, everything=True)
    assert there(sweeps) == {"current"}
    assert (root / ".venv").exists()


def test_while_a_sweep_runs_nothing_is_removed(root: Path, sweeps: dict[str, Path]) -> None:
    def unexpected(holder: str) -> NightshiftError:
        raise AssertionError(holder)

    with locks.held(root / paths.SWEEP_LOCK, unexpected), pytest.raises(CacheError, match=r"a sweep .* is running"):
        gc.collect(root, dry_run=False, everything=True)
    assert there(sweeps) == set(sweeps)


def test_it_waits_for_no_run_and_touches_nothing_while_there_is_one(root: Path, folders: dict[str, Path]) -> None:
    with Session(root), pytest.raises(CacheError, match="another run"):
        gc.collect(root, dry_run=False, everything=True)
    assert there(folders) == set(folders)


def test_the_command_says_what_it_removes_and_a_dry_run_removes_nothing(root: Path, folders: dict[str, Path]) -> None:
    done = nightshift(root, "gc", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert f"would remove {folders['finished'].relative_to(root)}  1.0 kB" in done.stdout
    assert f"kept {folders['killed'].relative_to(root)}" in done.stdout
    assert "2.0 kB would be freed" in done.stdout
    assert there(folders) == set(folders)
    done = nightshift(root, "gc", "--all")
    assert "4.0 kB freed" in done.stdout
    assert there(folders) == {"current"}
