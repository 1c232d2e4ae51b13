"""A training stage that is not in `algorithms`, by all ways to run: skipped, recorded, and free."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nightshift.adapters import mlflow_tracking
from nightshift.errors import ProjectError
from nightshift.pipeline import run
from nightshift.pipeline.run import Session
from nightshift.project import checksums, paths
from tests.command import dvc
from tests.conftest import choose, edit, nightshift
from tests.pipeline.conftest import STAGES, copied, ensure_all, enter, every

CACHED = every("cached")
SETTLED = CACHED | {"rloo": "skipped"}
NOTHING_TO_DO = {
    **dict.fromkeys(STAGES, "fresh"),
    **dict.fromkeys(("rloo", "rlpd"), "skipped (not in algorithms)"),
    "start": "skipped (start: scratch)",
}
UP_TO_DATE = "Data and pipelines are up to date"


@pytest.fixture(scope="module")
def clone_only(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same after a run without algorithms."""
    root = copied(finished, tmp_path_factory.mktemp("clone") / "project")
    choose(root)
    with pytest.MonkeyPatch.context() as patch:
        enter(root, patch)
        ran = dict.fromkeys(("choose", "opponent", "evaluate", "register"), "ran")
        again = CACHED | ran | {"rloo": "skipped"}
        assert ensure_all(root) == again
    return root


@pytest.fixture
def project(clone_only: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the project without algorithms; the test runs inside it."""
    root = copied(clone_only, tmp_path / "project")
    enter(root, monkeypatch)
    return root


def plan(root: Path) -> dict[str, str]:
    shown = nightshift(root, "plan")
    assert shown.returncode == 0, shown.stderr
    rows = [line.split(maxsplit=2) for line in shown.stdout.splitlines() if any(mark in line for mark in "○●–")]
    return {stage: " ".join(words.split()) for stage, _, words in rows}


def rloo_runs(root: Path) -> int:
    client = mlflow_tracking.connect(root)
    experiment = client.get_experiment_by_name(mlflow_tracking.EXPERIMENT)
    return len(client.search_runs([experiment.experiment_id], f"tags.`{mlflow_tracking.STAGE}` = 'rloo'"))


def test_the_clone_alone_is_evaluated_drawn_and_registered(clone_only: Path) -> None:
    report = json.loads((clone_only / paths.EVALUATION_REPORT).read_text())
    assert [candidate["name"] for candidate in report["candidates"]] == ["sft"]
    assert report["best"] == json.loads((clone_only / paths.RECEIPT).read_text())["candidate"] == "sft"
    assert (clone_only / paths.EVALUATION_FIGURE).exists()


def test_a_skipped_stage_leaves_a_folder_that_says_so_and_no_trace_of_a_run(
    clone_only: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = {path.name for path in (clone_only / paths.RLOO_POLICY).iterdir()}
    assert left == {paths.SKIPPED, "manifest.json"}
    for folder in (paths.METRICS, paths.STATE / "rloo"):
        before, after = (sorted(p.name for p in (root / folder).glob("rloo*")) for root in (finished, clone_only))
        assert after == before
    enter(clone_only, monkeypatch)
    assert rloo_runs(clone_only) == 1, "that of the training before it was skipped"


@pytest.mark.slow
def test_a_second_run_dvc_and_plan_agree_that_nothing_is_to_do(project: Path) -> None:
    assert ensure_all(project) == SETTLED
    assert UP_TO_DATE in dvc(project, "repro")
    assert plan(project) == NOTHING_TO_DO


def test_choosing_it_again_restores_its_policy_and_the_evaluation(project: Path, finished: Path) -> None:
    choose(project, "rloo")
    restored = dict.fromkeys(("choose", "rloo", "evaluate"), "restored")
    assert ensure_all(project) == CACHED | restored | {"opponent": "ran", "register": "ran"}
    for path in (paths.RLOO_POLICY, paths.EVALUATION):
        assert checksums.md5(project, path) == checksums.md5(finished, path)


@pytest.mark.slow
def test_dvc_repro_skips_it_and_restores_it_as_a_run_does(project: Path, finished: Path) -> None:
    choose(project, "rloo")
    assert "Stage 'rloo' is cached - skipping run" in dvc(project, "repro", "evaluate")
    assert checksums.md5(project, paths.RLOO_POLICY) == checksums.md5(finished, paths.RLOO_POLICY)
    choose(project)
    edit(project, "rloo", temperature=0.3)  # so that the run-cache has no such result
    told = dvc(project, "repro", "evaluate")
    assert "– rloo  skipped (not in algorithms)" in told
    assert "Running stage 'evaluate'" not in told
    with Session(project) as session:
        assert [run.ensure(stage, session).status for stage in ("rloo", "evaluate")] == ["skipped", "cached"]


def test_before_the_run_plan_says_what_is_skipped_and_that_the_evaluation_follows(
    finished: Path, tmp_path: Path
) -> None:
    root = copied(finished, tmp_path / "project")
    choose(root)
    shown = plan(root)
    assert shown["choose"].startswith("stale")
    assert "algorithms ['rloo'] → []" in shown["choose"]
    assert shown["rloo"] == "skipped (not in algorithms)"
    assert shown["evaluate"] == "stale follows rloo"


WATCHED_RUN = """
import sys
from nightshift.cli.app import main
sys.argv = ["nightshift", *sys.argv[1:]]
try:
    main()
finally:
    print("loaded:", sorted({"prefect", "torch", "ray", "mlflow", "mujoco"} & set(sys.modules)))
"""


def watched(root: Path, *arguments: str) -> str:
    command = [sys.executable, "-c", WATCHED_RUN, *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_editing_the_numbers_of_a_skipped_stage_makes_nothing_stale_and_costs_no_flow(project: Path) -> None:
    edit(project, "rloo", temperature=0.3)
    assert plan(project) == NOTHING_TO_DO
    told = watched(project, "run")
    assert "loaded: []" in told
    assert "– skipped" in told and "not in algorithms" in told
    assert UP_TO_DATE in dvc(project, "status")
    assert ensure_all(project) == SETTLED


def test_the_stage_itself_loads_no_simulator_tracker_or_network(project: Path) -> None:
    assert "loaded: []" in watched(project, "stage", "rloo")


def test_what_only_a_skipped_stage_needs_of_the_machine_is_not_missed(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    edit(project, "machine", device="cuda")
    edit(project, "rloo", temperature=0.3)
    assert ensure_all(project) == SETTLED


def test_a_skipped_folder_that_was_deleted_is_left_again_and_the_evaluation_stands(project: Path) -> None:
    shutil.rmtree(project / paths.RLOO_POLICY)
    assert ensure_all(project) == SETTLED


def test_a_training_stage_whose_choice_was_not_recorded_is_refused_before_any_work(project: Path) -> None:
    choose(project, "rloo")
    with Session(project) as session, pytest.raises(ProjectError, match=r"rloo\.json does not say") as refused:
        run.run_stage("rloo", session)
    assert refused.value.next_step == "nightshift stage choose rloo"
    assert (project / paths.RLOO_POLICY / paths.SKIPPED).exists()
