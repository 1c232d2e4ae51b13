"""Stages through DVC's cache, with the real stages on the fake environment."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from nightshift import config, files
from nightshift.adapters import mlflow_tracking, model_versions
from nightshift.errors import CacheError, ProjectError
from nightshift.pipeline import gc, precheck, run
from nightshift.pipeline.run import Session
from nightshift.policies.snapshot import PolicySnapshot
from nightshift.project import environment, graph, packages, paths
from nightshift.rollouts.local import LocalPool
from nightshift.telemetry import metric_names
from nightshift.types import RolloutRequest
from tests.cli.test_startup import HEAVY, modules_after
from tests.command import dvc
from tests.conftest import REPOSITORY, add_store, edit, git, install, installed_nightshift, make_project, nightshift
from tests.pipeline.conftest import STAGES, copied, ensure_all, enter, every
from tests.rollouts.parts import Reaching


@pytest.fixture
def project(finished: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The finished project, for tests that change nothing in it."""
    enter(finished, monkeypatch)
    return finished


@pytest.fixture
def own_project(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it."""
    root = copied(finished, tmp_path / "project")
    enter(root, monkeypatch)
    return root


def test_after_a_run_dvc_repro_is_up_to_date_and_a_second_run_is_cached(project: Path) -> None:
    assert "Data and pipelines are up to date" in dvc(project, "repro")
    assert ensure_all(project) == every("cached")


@pytest.mark.slow
def test_after_dvc_repro_a_run_finds_everything_cached(own_project: Path) -> None:
    edit(own_project, "register", model="another-name")
    assert "Running stage 'register'" in dvc(own_project, "repro")
    assert ensure_all(own_project) == every("cached")


def test_one_number_re_runs_its_stage_and_those_below_and_putting_it_back_restores(own_project: Path) -> None:
    edit(own_project, "rloo", iterations=2)
    again = {
        "states": "cached",
        "collect": "cached",
        "dataset": "cached",
        "start": "skipped",
        "sft": "cached",
        "choose": "cached",
        "rloo": "ran",
        "rlpd": "skipped",
        "opponent": "ran",
        "evaluate": "ran",
        "register": "ran",
    }
    assert ensure_all(own_project) == again
    edit(own_project, "rloo", iterations=1)
    assert ensure_all(own_project) == again | {"rloo": "restored", "evaluate": "restored"}


def fingerprints(root: Path) -> dict[str, str]:
    with Session(root) as session:
        return {stage: run.fingerprint(stage, session) for stage in STAGES}


def test_no_number_of_machine_changes_a_fingerprint_or_makes_a_stage_stale(own_project: Path) -> None:
    before = fingerprints(own_project)
    changes = {"device": "cpu", "workers": 1, "threads": 2, "requests_at_once": 3, "actors": 2, "ranks": 2}
    changes |= {"microbatch_size": 7, "free_disk_gb": 0.5, "listen": "127.0.0.1:7777", "gradient_checkpointing": True}
    changes |= {"microbatch_tokens": 4096, "placement": "apart"}
    changes |= {"strategy": "fsdp", "cpu_offload": True, "compile": True, "page": "127.0.0.1:0", "page_patience_s": 0.0}
    periods = {"sft_steps": 3, "rloo_iterations": 2, "rlpd_decisions": 5}
    edit(own_project, "machine", **changes, checkpoint_every=periods)
    assert set(config.Machine.model_fields) == {*changes, "checkpoint_every"}
    assert fingerprints(own_project) == before
    assert "Data and pipelines are up to date" in dvc(own_project, "status")
    assert ensure_all(own_project) == every("cached")


@pytest.mark.slow
def test_another_torch_makes_what_computes_with_it_stale_and_the_old_one_restores(
    own_project: Path, tmp_path: Path
) -> None:
    other = install(tmp_path, torch="9.9.9")
    plan = installed_nightshift(
        own_project, "plan", PYTHONPATH=os.pathsep.join([other, os.environ.get("PYTHONPATH", "")])
    )
    rows = {line.split()[0]: line for line in plan.stdout.splitlines() if line.strip()}
    assert "fresh" in rows["dataset"]
    assert re.search(r"stale +versions\.yaml: torch \S+ → 9\.9\.9", rows["sft"])
    assert "follows sft, rloo" in plan.stdout
    unchanged = {"states": "cached", "collect": "cached", "dataset": "cached", "choose": "cached"}
    unchanged |= {"start": "skipped", "rlpd": "skipped"}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(other)
        result = ensure_all(own_project)
        assert result == unchanged | dict.fromkeys(("sft", "rloo", "opponent", "evaluate"), "ran") | {
            "register": result["register"]
        }
        assert "Data and pipelines are up to date" in dvc(own_project, "repro")
    assert ensure_all(own_project) | {"register": ""} == unchanged | {
        "opponent": "ran",
        "sft": "restored",
        "rloo": "restored",
        "evaluate": "restored",
        "register": "",
    }


def test_a_checkpoint_made_with_another_torch_is_not_resumed(own_project: Path, tmp_path: Path) -> None:
    with Session(own_project) as session:
        run.run_stage("sft", session)
        ours = run.fingerprint("sft", session)
    assert list((own_project / paths.stage_state("sft", ours)).glob("step-*"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(install(tmp_path, torch="8.8.8"))
        with Session(own_project) as session:
            run.run_stage("sft", session)
            theirs = run.fingerprint("sft", session)
    assert theirs != ours
    assert steps_recorded(own_project, "sft", theirs) == [20], "a resumed run has no step left to record"


def test_packages_installed_during_a_run_stop_the_next_stage(own_project: Path, tmp_path: Path) -> None:
    edit(own_project, "sft", learning_rate=3.0e-3)
    with Session(own_project) as session, pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(install(tmp_path, torch="7.7.7"))
        with pytest.raises(ProjectError, match="packages were installed while the pipeline ran"):
            run.ensure("sft", session)


def test_dvc_repro_typed_first_in_a_clone_records_the_versions_it_ran_with_and_a_run_agrees(
    tmp_path: Path, migrated_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_project(tmp_path / "project")
    add_store(root, migrated_store)
    enter(root, monkeypatch)
    packages.record(root, graph.load(root))  # as `make setup` does
    other = install(tmp_path, numpy="9.9.9")  # installed since
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([other, *sys.path]))
    dvc(root, "repro", "states")
    lock = yaml.safe_load((root / paths.DVC_LOCK).read_text())["stages"]
    assert lock["states"]["params"]["versions.yaml"]["numpy"] == "9.9.9"
    monkeypatch.syspath_prepend(other)
    with Session(root) as session:
        assert run.ensure("states", session).status == "cached"


def test_setting_up_writes_the_versions_that_dvc_repro_needs() -> None:
    everything = ["make", "--dry-run", "--always-make", "setup"]
    done = subprocess.run(everything, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert ".venv/bin/nightshift versions\n" in done.stdout


def steps_recorded(root: Path, stage: str, fingerprint: str) -> list[int]:
    path = root / paths.stage_metrics(stage, fingerprint)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["step"] for line in lines if "step" in line]


def test_metrics_outlive_their_stage_and_hold_every_policy_of_an_evaluation(project: Path) -> None:
    with Session(project) as session:
        path = project / paths.stage_metrics("evaluate", run.fingerprint("evaluate", session))
    assert not list((project / ".state/evaluate").iterdir())
    logged = {name for line in path.read_text().splitlines() for name in json.loads(line)}
    candidates = json.loads((project / paths.EVALUATION_REPORT).read_text())["candidates"]
    assert len(candidates) > 1
    assert {f"success/{candidate['name']}" for candidate in candidates} <= logged


def test_a_stage_that_is_forced_to_run_again_begins_new_metrics(own_project: Path) -> None:
    with Session(own_project) as session:
        fingerprint = run.fingerprint("sft", session)
    files.append_json(own_project / paths.stage_metrics("sft", fingerprint), {"step": 10**6, "sft/loss": 9.0})
    with Session(own_project, run.Choice.of(own_project, "", ["sft"])) as session:
        assert run.ensure("sft", session).status == "ran"
    assert steps_recorded(own_project, "sft", fingerprint) == [20]


def test_data_is_not_read_to_start_a_run_and_to_find_its_checkpoints(own_project: Path) -> None:
    folder = own_project / paths.IMPORTS / "huge"
    with files.new_folder(folder) as new:
        (new / "episodes").touch()
    os.truncate(folder / "episodes", 2**28)
    try:
        before = bytes_read()
        with Session(own_project) as session:
            with_import = run.fingerprint("dataset", session)
            session.check_unchanged()
        assert bytes_read() - before < 2**26
    finally:
        shutil.rmtree(folder)
    with Session(own_project) as session:
        assert run.fingerprint("dataset", session) != with_import


def bytes_read() -> int:
    """By this process so far, from files of any kind."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_finished_stage_leaves_no_checkpoint_and_another_numbers_work_is_kept(own_project: Path) -> None:
    other = own_project / ".state/sft/0000000000000000"
    other.mkdir(parents=True)
    (other / "file").touch()
    edit(own_project, "sft", learning_rate=2.0e-3)
    with Session(own_project) as session:
        assert run.ensure("sft", session).status == "ran"
    assert list((own_project / ".state/sft").iterdir()) == [other]


CELLS = 4
"""Episodes that each policy of the finished project plays in an evaluation."""


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Episodes that were asked for, by policy that played."""
    play, found = LocalPool.run, []

    def run(pool: LocalPool, requests: Sequence[RolloutRequest], policy: PolicySnapshot | None = None) -> Any:
        found.append(len(requests))
        return play(pool, requests, policy)

    monkeypatch.setattr(LocalPool, "run", run)
    return found


def evaluate_anew(root: Path, choice: run.Choice | None = None) -> str:
    with Session(root, choice) as session:
        return run.ensure("evaluate", session).status


def test_a_policy_that_was_trained_again_plays_alone(own_project: Path, counts: list[int]) -> None:
    Reaching.leave(own_project / paths.RLOO_POLICY, gain=20.0)
    assert evaluate_anew(own_project) == "ran"
    assert counts == [CELLS]
    with (own_project / "src/nightshift/policies/__init__.py").open("a") as code:
        code.write("\n")
    assert evaluate_anew(own_project) == "ran"
    assert counts[1:] == [CELLS, CELLS], "other code may play otherwise"


def test_a_forced_evaluation_plays_all_again_and_a_repeated_one_nothing(own_project: Path, counts: list[int]) -> None:
    forced = run.Choice.of(own_project, "", ["evaluate"])
    Reaching.leave(own_project / paths.RLOO_POLICY, gain=20.0)
    assert evaluate_anew(own_project, forced) == "ran"
    assert counts == [CELLS, CELLS], "the clone has played before, and it was forced"
    assert evaluate_anew(own_project, forced) == "ran"
    assert counts == [CELLS] * 4
    for _ in range(2):
        with Session(own_project) as session:
            run.run_stage("evaluate", session)  # as `nightshift stage evaluate` does
    assert counts == [CELLS] * 4
    assert evaluate_anew(own_project, forced) == "ran"
    assert counts == [CELLS] * 6
    Reaching.leave(own_project / paths.RLOO_POLICY, gain=10.0)
    assert evaluate_anew(own_project) == "ran"
    assert counts == [CELLS] * 7


def test_an_evaluation_that_failed_before_it_played_forgets_nothing(
    own_project: Path, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    Reaching.leave(own_project / paths.RLOO_POLICY, gain=20.0)
    with monkeypatch.context() as patched, pytest.raises(ProjectError, match="cut off"):
        patched.setattr(run, "_job", cut_off)
        evaluate_anew(own_project)
    assert evaluate_anew(own_project) == "ran"
    assert counts == [CELLS]


def cut_off(*_: Any, **__: Any) -> Any:
    raise ProjectError("cut off", "try again")


def test_what_the_policies_here_have_played_is_not_cleaned_up(own_project: Path, counts: list[int]) -> None:
    played = own_project / paths.PLAYED
    before = set(played.iterdir())
    (played / ".half-written.jsonl.partial-1").touch()
    for gain in (20.0, 10.0):
        Reaching.leave(own_project / paths.RLOO_POLICY, gain=gain)
        evaluate_anew(own_project)
    assert len(set(played.glob("*.jsonl")) - before) == 2
    size = sum(path.stat().st_size for path in played.iterdir())
    found = [one for one in gc.collect(own_project, dry_run=False, everything=True) if one.path.parent == paths.PLAYED]
    kept = {own_project / one.path for one in found if one.kept_for == gc.CURRENT}
    assert set(played.iterdir()) == kept
    assert (len(kept), len(found), sum(one.size for one in found)) == (2, len(before) + 3, size)
    Reaching.leave(own_project / paths.RLOO_POLICY, gain=5.0)
    evaluate_anew(own_project)
    assert counts == [CELLS] * 3, "the clone is known still"
    edit(own_project, "env", horizon=13)
    gc.collect(own_project, dry_run=False, everything=False)
    assert not list(played.iterdir())


def test_an_edit_during_a_run_stops_the_next_stage(own_project: Path) -> None:
    with Session(own_project) as session:
        edit(own_project, "sft", learning_rate=3.0e-3)
        with pytest.raises(ProjectError, match="was edited while the pipeline ran"):
            run.ensure("sft", session)


def test_an_edit_while_a_stage_is_checked_does_not_put_its_result_under_the_new_numbers(
    own_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What DVC records as the params of a stage are those of the file at that moment."""
    check = precheck.check

    def edited_meanwhile(*arguments: Any, **keywords: Any) -> None:
        check(*arguments, **keywords)
        edit(own_project, "sft", learning_rate=4.0e-3)

    edit(own_project, "sft", learning_rate=3.0e-3)
    with Session(own_project) as session, monkeypatch.context() as patch:
        patch.setattr(precheck, "check", edited_meanwhile)
        with pytest.raises(ProjectError, match="was edited while the pipeline ran"):
            run.ensure("sft", session)
    with Session(own_project) as session:
        assert run.ensure("sft", session).status == "ran"


def test_an_edit_of_what_changes_no_result_does_not_end_a_run(own_project: Path) -> None:
    with Session(own_project) as session:
        edit(own_project, "notify", events=["failure"])
        edit(own_project, "nightly", commit=False)
        session.check_unchanged()


def test_two_runs_at_once_are_refused(project: Path) -> None:
    with Session(project), pytest.raises(CacheError, match="another run"), Session(project):
        pass


def test_a_fingerprint_follows_params_inputs_and_code(own_project: Path) -> None:
    first = run.fingerprint("rloo", Session(own_project))
    edit(own_project, "sft", learning_rate=4.0e-3)
    assert run.fingerprint("rloo", Session(own_project)) == first, "sft's numbers reach rloo through its inputs only"
    edit(own_project, "rloo", temperature=0.3)
    changed = run.fingerprint("rloo", Session(own_project))
    assert changed != first
    with (own_project / "src/nightshift/algorithms/__init__.py").open("a") as code:
        code.write("\n")
    assert run.fingerprint("rloo", Session(own_project)) not in (first, changed)


def test_the_command_finds_everything_cached_in_seconds_and_shows_the_summary(project: Path) -> None:
    done = nightshift(project, "run")
    assert done.returncode == 0, done.stderr
    for words in ("cached", "after SFT", "after RL", "95 % interval", "champion"):
        assert words in done.stdout
    assert "ran" not in done.stdout.split("held-out")[0].replace("when it ran", "")


@pytest.mark.parametrize("command", ["plan()", "run('', [])"])
def test_where_everything_is_fresh_plan_and_run_import_dvc_alone_of_the_heavy_packages(
    command: str, project: Path
) -> None:
    assert HEAVY & modules_after(f"from nightshift.cli import commands; commands.{command}", project) == {"dvc"}


def test_plan_names_the_number_that_changed(own_project: Path) -> None:
    edit(own_project, "rloo", temperature=0.2)
    done = nightshift(own_project, "plan")
    assert "params.yaml: rloo.temperature 0.4 → 0.2" in done.stdout
    assert "follows rloo" in done.stdout


def test_dataset_versions_are_listed_and_shown(project: Path) -> None:
    listed = nightshift(project, "dataset", "ls")
    assert "workspace" in listed.stdout
    shown = nightshift(project, "dataset", "show", "workspace")
    assert "8 episodes" in shown.stdout
    assert nightshift(project, "dataset", "show", "nowhere").returncode == 1


def test_a_registered_model_acts_in_the_simulator_again(project: Path) -> None:
    done = nightshift(project, "predict", "--model", "challenger", "--task", "near", "--episodes", "1")
    assert done.returncode == 0, done.stderr
    assert re.search(r"near .* [01]/1 ", done.stdout)
    receipt = json.loads((project / paths.RECEIPT).read_text())
    assert "challenger" in receipt["aliases"]


def parents(root: Path) -> list[model_versions.PipelineRun]:
    return model_versions.runs(root, 1000)


def test_the_run_of_the_pipeline_has_results_and_links_to_every_stage(own_project: Path) -> None:
    edit(own_project, "evaluate", init_states=1)
    ensure_all(own_project)
    newest = parents(own_project)[0]
    report = json.loads((own_project / paths.EVALUATION_REPORT).read_text())
    receipt = json.loads((own_project / paths.RECEIPT).read_text())
    best = next(c for c in report["candidates"] if c["name"] == report["best"])
    assert (newest.success, newest.low) == (best["overall"]["rate"], best["overall"]["low"])
    assert (newest.version, newest.status) == (receipt["version"], "finished")
    assert "evaluate.init_states 2 → 1" in newest.changed
    run_of_it = mlflow_tracking.connect(own_project).get_run(newest.run_id)
    tasks = {metric_names.task_success(task): rate["rate"] for task, rate in best["tasks"].items()}
    assert tasks.items() <= run_of_it.data.metrics.items()
    assert run_of_it.data.tags["gate.reason"] == receipt["reason"]
    linked = {tag.removeprefix("nightshift.cached.") for tag in run_of_it.data.tags if "nightshift.cached." in tag}
    assert linked == {"states", "collect", "dataset", "sft", "choose", "rloo"}
    for stage in ("evaluate", "register", *linked):
        assert f"[{stage}](" in run_of_it.data.tags["mlflow.note.content"]


@pytest.mark.parametrize(
    ("stage", "read"),
    [
        ("states", set()),
        ("collect", {"data/init_states"}),
        ("dataset", {"data/demos", "data/imports"}),
        ("sft", {"data/dataset"}),
        ("choose", set()),
        ("rloo", {"data/algorithms/rloo.json", "data/dataset", "data/init_states", "models/sft"}),
        ("opponent", set()),
        ("evaluate", {"models/sft", "models/rloo"}),
        ("register", {"data/dataset", "models/sft", "models/rloo", "reports/evaluation"}),
    ],
)
def test_every_stage_names_the_data_that_it_read(project: Path, stage: str, read: set[str]) -> None:
    client = mlflow_tracking.connect(project)
    experiment = client.get_experiment_by_name(mlflow_tracking.EXPERIMENT)
    found = client.search_runs([experiment.experiment_id], f"tags.`nightshift.stage` = '{stage}'")
    names = {used.dataset.name: used.dataset.digest for used in found[-1].inputs.dataset_inputs}
    assert set(names) == read
    for name in read - {"data/imports"}:  # which no stage makes
        assert names[name] == graph.recorded_md5(project, Path(name)), name


@pytest.mark.slow
def test_a_checkout_of_the_past_is_whole_and_a_run_there_moves_no_alias_backwards(own_project: Path) -> None:
    root = own_project
    git(root, "add", "-A")
    git(root, "commit", "-qm", "old")
    git(root, "tag", "old")
    edit(root, "rloo", iterations=2)
    ensure_all(root)
    receipt = json.loads((root / paths.RECEIPT).read_text())
    git(root, "commit", "-qam", "new")
    before = mlflow_tracking.connect(root).get_registered_model(receipt["model"]).aliases
    git(root, "checkout", "-q", "old")
    dvc(root, "checkout")
    assert run.stale(run.statuses(root)) == [], "nothing is stale, the receipt of the registration included"
    assert ensure_all(root) == every("cached")
    with Session(root) as session:
        run.renew("register", session)
    assert mlflow_tracking.connect(root).get_registered_model(receipt["model"]).aliases == before
    again = json.loads((root / paths.RECEIPT).read_text())
    if again["version"] != receipt["version"]:  # validation may hand on the clone both times
        assert "only nightshift promote moves an alias to an older version" in again["reason"]


def test_a_run_of_the_past_is_reproduced_in_a_folder_of_its_own(project: Path, tmp_path: Path) -> None:
    oldest = parents(project)[-1]
    done = nightshift(project, "reproduce", oldest.run_id[:8], "--to", str(tmp_path / "again"))
    assert done.returncode == 0, done.stderr
    assert f"to run it: cd {tmp_path / 'again'} && make setup" in done.stdout
    there = yaml.safe_load((tmp_path / "again/params.yaml").read_text())
    assert there["rloo"]["iterations"] == int(oldest.params["rloo.iterations"])
    for path in (paths.DATASET, paths.RLOO_POLICY, paths.EVALUATION, paths.RECEIPT):
        assert (tmp_path / "again" / path).exists(), path
    assert git(tmp_path / "again", "rev-parse", "--short=12", "HEAD").strip() == oldest.commit.removesuffix("+")
    assert (project / paths.PLAYED).exists()
    assert not (tmp_path / "again" / paths.PLAYED).exists(), "what is evaluated there is played there"
    assert nightshift(project, "reproduce", "nothing").returncode == 1


@pytest.mark.slow
def test_a_sweep_shares_the_cache_registers_nothing_and_its_trials_are_runs_in_mlflow(own_project: Path) -> None:
    versions_before = len(model_versions.versions(own_project, "nightshift-libero-mini"))
    done = nightshift(own_project, "sweep", "evaluate.init_states=1,2")
    assert done.returncode == 0, done.stdout + done.stderr
    (written,) = (own_project / ".state/sweep").glob("*/1-trial.log")
    log = written.read_text()
    for stage in ("collect", "sft", "rloo"):
        assert re.search(rf"✔ {stage}  (cached|restored)", log), log
    assert re.search(r"✔ evaluate  (ran|restored)", log), log
    assert re.search(r"2 +[\d.]+ % .* evaluate\.init_states=2", done.stdout)
    assert len(model_versions.versions(own_project, "nightshift-libero-mini")) == versions_before
    trials = [model_versions.find_run(own_project, f"evaluate.init_states={count}") for count in (1, 2)]
    assert all(trial.success is not None for trial in trials), "compared in MLflow, by names that people can read"
    assert all(trial.run_id[:8] in done.stdout for trial in trials)
    compared = nightshift(own_project, "compare", trials[0].run_id[:8], trials[1].run_id[:8])
    assert "→ 2 init states" in " ".join(compared.stdout.split()), compared.stderr


def test_telemetry_is_off_and_the_users_own_settings_win(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in environment.NO_TELEMETRY:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://elsewhere")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    environment.apply(tmp_path)
    assert os.environ["DO_NOT_TRACK"] == "true"
    assert os.environ["MLFLOW_TRACKING_URI"] == "http://elsewhere"
