"""Stages through DVC's cache, with the real stages on the fake environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nightshift import config
from nightshift.errors import CacheError, ProjectError
from nightshift.pipeline import run
from nightshift.pipeline.run import Session
from nightshift.project import environment, paths
from tests.conftest import edit, git, make_project, nightshift

STAGES = ["states", "collect", "dataset", "sft", "rloo", "evaluate", "register"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose stages have all run, in this process."""
    root = make_project(tmp_path_factory.mktemp("run") / "project")
    edit(root, "sft", steps=20)
    edit(root, "rloo", iterations=1)
    edit(root, "evaluate", init_states=2)
    git(root, "commit", "-qam", "smaller")
    with pytest.MonkeyPatch.context() as patch:
        enter(root, patch)
        assert ensure_all(root) == dict.fromkeys(STAGES, "ran")
    return root


def enter(root: Path, patch: pytest.MonkeyPatch) -> None:
    patch.chdir(root)
    patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root / paths.MLFLOW_DATABASE}")


@pytest.fixture
def project(finished: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The finished project; what a test changes is put back."""
    enter(finished, monkeypatch)
    before = (finished / "params.yaml").read_text()
    yield finished
    (finished / "params.yaml").write_text(before)
    ensure_all(finished)


def ensure_all(root: Path) -> dict[str, str]:
    with Session(root) as session:
        return {stage: run.ensure(stage, session).how for stage in STAGES}


def dvc(root: Path, *arguments: str) -> str:
    command = [str(root / ".venv/bin/dvc"), *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_after_a_run_dvc_repro_is_up_to_date_and_a_second_run_is_cached(project: Path) -> None:
    assert "Data and pipelines are up to date" in dvc(project, "repro")
    assert ensure_all(project) == dict.fromkeys(STAGES, "cached")


def test_after_dvc_repro_a_run_finds_everything_cached(project: Path) -> None:
    edit(project, "register", model="another-name")
    assert "Running stage 'register'" in dvc(project, "repro")
    assert ensure_all(project) == dict.fromkeys(STAGES, "cached")


def test_one_number_re_runs_its_stage_and_those_below_and_putting_it_back_restores(project: Path) -> None:
    edit(project, "rloo", iterations=2)
    again = {
        "states": "cached",
        "collect": "cached",
        "dataset": "cached",
        "sft": "cached",
        "rloo": "ran",
        "evaluate": "ran",
        "register": "ran",
    }
    assert ensure_all(project) == again
    edit(project, "rloo", iterations=1)
    assert ensure_all(project) == again | {"rloo": "restored", "evaluate": "restored"}


def fingerprints(root: Path) -> dict[str, str]:
    with Session(root) as session:
        return {stage: run.fingerprint(stage, session) for stage in STAGES}


def test_no_number_of_machine_changes_a_fingerprint_or_makes_a_stage_stale(project: Path) -> None:
    before = fingerprints(project)
    changes = {"workers": 1, "ranks": 2, "microbatch_size": 7}
    edit(project, "machine", **changes, checkpoint_every={"sft_steps": 3, "rloo_iterations": 2})
    assert set(config.Machine.model_fields) == {*changes, "checkpoint_every"}
    assert fingerprints(project) == before
    assert "Data and pipelines are up to date" in dvc(project, "status")
    assert ensure_all(project) == dict.fromkeys(STAGES, "cached")


def test_a_finished_stage_leaves_no_checkpoint_and_another_numbers_work_is_kept(project: Path) -> None:
    other = project / ".state/sft/0000000000000000"
    other.mkdir(parents=True)
    (other / "file").touch()
    edit(project, "sft", learning_rate=2.0e-3)
    ensure_all(project)
    assert list((project / ".state/sft").iterdir()) == [other]


def test_an_edit_during_a_run_stops_the_next_stage(project: Path) -> None:
    with Session(project) as session:
        edit(project, "sft", learning_rate=3.0e-3)
        with pytest.raises(ProjectError, match="was edited while the pipeline ran"):
            run.ensure("sft", session)


def test_two_runs_at_once_are_refused(project: Path) -> None:
    with Session(project), pytest.raises(CacheError, match="another run"), Session(project):
        pass


def test_a_fingerprint_follows_params_inputs_and_code(project: Path) -> None:
    first = run.fingerprint("rloo", Session(project))
    edit(project, "sft", learning_rate=4.0e-3)
    assert run.fingerprint("rloo", Session(project)) == first, "sft's numbers reach rloo through its inputs only"
    edit(project, "rloo", temperature=0.3)
    changed = run.fingerprint("rloo", Session(project))
    assert changed != first
    code = project / "src/nightshift/algorithms/__init__.py"
    before = code.read_text()
    code.write_text(before + "\n")
    assert run.fingerprint("rloo", Session(project)) not in (first, changed)
    code.write_text(before)


def test_the_command_finds_everything_cached_in_seconds_and_shows_the_summary(project: Path) -> None:
    done = nightshift(project, "run")
    assert done.returncode == 0, done.stderr
    for words in ("cached", "after SFT", "after RL", "95 % interval", "champion"):
        assert words in done.stdout
    assert "ran" not in done.stdout.split("held-out")[0].replace("when it ran", "")


def test_a_run_that_finds_everything_cached_loads_no_heavy_package(project: Path) -> None:
    program = """
import sys
from nightshift.cli.app import main
sys.argv = ["nightshift", "run"]
try:
    main()
finally:
    print("loaded:", sorted({"prefect", "torch", "ray", "mlflow"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=project, capture_output=True, text=True, check=False)
    assert "loaded: []" in done.stdout, done.stderr


def test_plan_names_the_number_that_changed(project: Path) -> None:
    edit(project, "rloo", temperature=0.2)
    done = nightshift(project, "plan")
    assert "params.yaml: rloo.temperature 0.4 → 0.2" in done.stdout
    assert "follows rloo" in done.stdout


def test_dataset_versions_are_listed_and_shown(project: Path) -> None:
    listed = nightshift(project, "dataset", "ls")
    assert "workspace" in listed.stdout
    shown = nightshift(project, "dataset", "show", "workspace")
    assert "8 episodes" in shown.stdout
    assert nightshift(project, "dataset", "show", "nowhere").returncode == 1


def test_a_registered_model_acts_in_the_simulator_again(project: Path) -> None:
    done = nightshift(project, "predict", "--model", "challenger", "--task", "near", "--episodes", "2")
    assert done.returncode == 0, done.stderr
    assert "/2" in done.stdout
    receipt = json.loads((project / paths.RECEIPT).read_text())
    assert "challenger" in receipt["aliases"]


def test_telemetry_is_off_and_the_users_own_settings_win(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in environment.NO_TELEMETRY:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://elsewhere")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    environment.apply(tmp_path)
    assert os.environ["DO_NOT_TRACK"] == "true"
    assert os.environ["MLFLOW_TRACKING_URI"] == "http://elsewhere"
