from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException

from nightshift import config, files, policies
from nightshift.adapters import mlflow_registry, mlflow_tracking, model_versions
from nightshift.errors import DataError, Unreachable
from nightshift.pipeline import results, robustness, run
from nightshift.pipeline.job import Job
from nightshift.project import paths, robustness_grid
from nightshift.reports.candidates import read_opponent
from nightshift.stages import _champion, register
from nightshift.statistics.intervals import Rate
from tests.conftest import add_store, edit, make_project
from tests.policies.openvla_oft import published
from tests.policies.openvla_oft import test_checkpoint as openvla_oft

GRID = {"digest": "g1", "code": "c1"}
SPEC = {"family": "gaussian_mlp", "inputs": {"objects": 3}, "hidden": [4], "chunk": 1, "action_dim": 7}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With its code: some tests register as a run does."""
    root = make_project(tmp_path / "project")
    monkeypatch.chdir(root)
    return root


@pytest.fixture
def trained(project: Path, migrated_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose two policies are trained and evaluated; the second is better."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{project}/{paths.MLFLOW_DATABASE}")
    add_store(project, migrated_store)
    paths.DVC_LOCK.write_text("stages: {dataset: {outs: [{path: data/dataset, md5: abc.dir}]}}")
    train("sft")
    train("rloo")
    leave_evaluation(sft=90, rloo=150)
    return project


def train(name: str) -> None:
    with files.new_folder(paths.MODELS / name) as folder:
        policies.save(policies.build(SPEC), folder)


def leave_evaluation(**solved: int) -> None:
    """As the stage `evaluate` does: 200 states each, the last two invalid, and how many of the first are solved."""
    outcomes = {
        name: [
            {"task": "near", "init_state": i, "success": i < count, "length": 9, "valid": i < 198} for i in range(200)
        ]
        for name, count in solved.items()
    }
    candidates = [
        {
            "name": name,
            "label": name.upper(),
            "overall": Rate(count, 198).to_json(),
            "invalid": 2,
            "tasks": {},
            "gain": None,
        }
        for name, count in solved.items()
    ]
    report = {"grid": GRID, "best": max(solved, key=lambda name: solved[name]), "candidates": candidates}
    with files.new_folder(paths.EVALUATION) as folder:
        files.write_json(folder / paths.EVALUATION_REPORT.name, report)
        files.write_json(folder / paths.EVALUATION_OUTCOMES.name, outcomes)


def registered(job: Job, params: config.Params) -> Any:
    register.run(job, register=params.section("register"))
    return json.loads(paths.RECEIPT.read_text())


def test_the_receipt_tells_version_aliases_reason_and_lineage(
    trained: Path, params: config.Params, job: Callable[[str], Job]
) -> None:
    receipt = registered(job("register"), params)
    assert (receipt["version"], receipt["candidate"]) == ("1", "rloo")
    assert receipt["aliases"] == ["challenger", "champion"]
    assert receipt["reason"] == "version 1 (rloo) becomes champion: there was none, and it solved 150 of 198 states"
    assert (receipt["p_value"], receipt["level"]) == (None, 0.05)
    assert receipt["tags"]["dataset.md5"] == "abc.dir"
    assert receipt["tags"]["code.commit"] == "abc1234"
    assert receipt["evaluation"]["successes"] == 150
    assert receipt["evaluation"]["invalid"] == 2
    assert mlflow_registry.load(trained, receipt["model"], "champion")
    assert receipt["verdict"] == "promoted"
    again = registered(job("register"), params)
    assert again == receipt | {"verdict": "champion already"}, "registering again changes nothing"


def test_register_weights_says_what_mlflow_stores(
    trained: Path, params: config.Params, job: Callable[[str], Job]
) -> None:
    policy = openvla_oft.load(published.write(trained / "base"), lora={"rank": 2, "alpha": 4.0, "targets": ["q_proj"]})
    with files.new_folder(paths.MODELS / "rloo") as folder:
        policies.save(policy, folder)
    chosen = params.section("register").model_copy(update={"weights": "adapter"})
    register.run(job("register"), register=chosen)
    entrant = robustness.find(trained, params, "champion")
    assert entrant.weights == files.sha256(paths.RLOO_POLICY / policies.WEIGHTS)
    assert entrant.spec == files.sha256(paths.RLOO_POLICY / policies.SPEC)
    champion = mlflow_registry.champion(trained, chosen.model)
    assert champion is not None
    _champion.leave(paths.OPPONENT, champion)
    opponent = read_opponent(Path())
    assert opponent is not None
    assert opponent.weights == entrant.weights, "the registry knows the champion by these when it has played"
    shutil.rmtree(trained / "base")
    with pytest.raises(DataError, match="adapter on the published checkpoint"):
        robustness.find(trained, params, "champion")


@pytest.mark.usefixtures("trained")
def test_a_registration_counts_for_its_own_evaluation_and_for_no_other_on_the_same_grid(
    params: config.Params, job: Callable[[str], Job]
) -> None:
    receipt = registered(job("register"), params)
    assert results.read(Path()).registration == receipt
    leave_evaluation(sft=90, rloo=151)
    assert results.read(Path()).evaluation["grid"] == GRID
    assert results.read(Path()).registration == {}
    shutil.rmtree(paths.EVALUATION)
    assert results.read(Path()).registration == {}


@pytest.mark.usefixtures("trained")
def test_the_clone_is_registered_if_it_is_the_best_candidate(params: config.Params, job: Callable[[str], Job]) -> None:
    leave_evaluation(sft=150, rloo=140)
    receipt = registered(job("register"), params)
    assert receipt["candidate"] == "sft"
    assert receipt["reason"].startswith("version 1 (sft) becomes champion")


def test_the_level_of_params_yaml_decides(trained: Path, params: config.Params, job: Callable[[str], Job]) -> None:
    registered(job("register"), params)
    train("rloo")
    leave_evaluation(sft=90, rloo=153)  # three states more: p = 1/8
    receipt = registered(replace(job("register"), fingerprint="second"), params)
    assert (receipt["version"], receipt["champion"], receipt["p_value"]) == ("2", "1", 0.125)
    assert "cannot be told" in receipt["reason"]
    lenient = params.section("register").model_copy(update={"level": 0.2})
    register.run(replace(job("register"), fingerprint="third"), register=lenient)
    receipt = json.loads(paths.RECEIPT.read_text())
    assert (receipt["version"], receipt["champion"]) == ("2", "2"), "the same weights are no third version"
    assert receipt["reason"] == (
        "version 2 (rloo) becomes champion: of 198 states valid for both it solved 3 that version 1 failed "
        "and failed 0 that version 1 solved (exact p = 0.125, level 0.2)"
    )
    tags = mlflow_tracking.connect(trained).get_model_version(receipt["model"], "2").tags
    assert (tags[mlflow_registry.REASON], tags[mlflow_registry.LEVEL]) == (receipt["reason"], "0.2")


@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize("path", [paths.EVALUATION_REPORT, paths.EVALUATION_OUTCOMES])
def test_a_damaged_evaluation_is_named_and_nothing_is_registered(
    params: config.Params, job: Callable[[str], Job], path: Path
) -> None:
    path.write_text("{")
    with pytest.raises(DataError, match=f"{path.name} is missing or damaged"):
        register.run(job("register"), register=params.section("register"))
    assert not paths.RECEIPT.exists()


def test_an_outage_while_the_results_are_published_is_worth_another_try_which_tells_the_promotion(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unanswered(*_: Any) -> None:
        raise MlflowException("API request to http://127.0.0.1:9 failed")

    with run.Session(trained) as session:
        with monkeypatch.context() as patch:
            patch.setattr(mlflow_tracking.Tracking, "publish", unanswered)
            with pytest.raises(Unreachable):
                run.run_stage("register", session)
        run.run_stage("register", session)
    assert json.loads(paths.RECEIPT.read_text())["verdict"] == "promoted"
    (published,) = model_versions.runs(trained, 10)
    assert (published.version, published.promoted) == ("1", True)


def test_a_run_that_has_only_evaluated_shows_no_registration_of_an_earlier_run(trained: Path) -> None:
    with run.Session(trained) as session:
        run.run_stage("register", session)
    with run.Session(trained) as session:
        run.publish("evaluate", session)
    newest, before = model_versions.runs(trained, 10)
    assert (before.version, before.promoted) == ("1", True)
    assert (newest.version, newest.promoted) == ("", False)
    assert newest.success == before.success


def leave_robustness(ours: str, theirs: str, gain: float) -> None:
    """As `nightshift robustness OURS --against THEIRS` does."""
    row = {"overall": {"gain": gain}}
    report = {
        "grid": robustness_grid.digest(Path(), config.load(paths.PARAMS)),
        "policies": [{"weights": files.sha256(Path(one) / policies.WEIGHTS)} for one in (ours, theirs)],
        "against": {"perturbations": {"action_delay": row}},
    }
    files.write_json(paths.ROBUSTNESS_REPORT, report)


@pytest.mark.parametrize(
    ("gain", "verdict", "words"),
    [
        (
            None,
            "not promoted",
            "they have not been compared under the perturbations of params.yaml (nightshift robustness challenger",
        ),
        (-0.3, "not promoted", "it is lower than version 1 by 30.0 points under action_delay (margin 10)"),
        (-0.05, "promoted", "version 2 (sft) becomes champion"),
    ],
)
def test_a_better_policy_is_promoted_only_if_it_falls_under_no_perturbation(
    trained: Path, params: config.Params, job: Callable[[str], Job], gain: float | None, verdict: str, words: str
) -> None:
    rules = params.section("register").model_copy(update={"max_perturbation_drop": 0.1})
    register.run(job("register"), register=rules)  # the first champion has none to fall behind
    leave_evaluation(sft=190, rloo=150)
    if gain is not None:
        leave_robustness("models/sft", "models/rloo", gain)
    register.run(replace(job("register"), fingerprint="next"), register=rules)
    receipt = json.loads(paths.RECEIPT.read_text())
    assert receipt["verdict"] == verdict
    assert words in receipt["reason"]
    assert receipt["champion"] == ("2" if verdict == "promoted" else "1")


def test_the_robustness_of_other_weights_does_not_count(
    trained: Path, params: config.Params, job: Callable[[str], Job]
) -> None:
    rules = params.section("register").model_copy(update={"max_perturbation_drop": 0.1})
    register.run(job("register"), register=rules)
    leave_evaluation(sft=190, rloo=150)
    leave_robustness("models/rloo", "models/sft", 0.5)
    register.run(replace(job("register"), fingerprint="next"), register=rules)
    assert "have not been compared" in json.loads(paths.RECEIPT.read_text())["reason"]


@pytest.mark.parametrize("changes", [{"init_states": 1}, {"perturbations": ["action_delay"]}, {"strengths": [1.0]}])
def test_a_comparison_on_another_grid_than_that_of_params_yaml_does_not_count(
    trained: Path, params: config.Params, job: Callable[[str], Job], changes: dict[str, Any]
) -> None:
    rules = params.section("register").model_copy(update={"max_perturbation_drop": 0.1})
    register.run(job("register"), register=rules)
    leave_evaluation(sft=190, rloo=150)
    leave_robustness("models/sft", "models/rloo", 0.5)
    edit(trained, "robustness", **changes)
    register.run(replace(job("register"), fingerprint="next"), register=rules)
    assert "have not been compared" in json.loads(paths.RECEIPT.read_text())["reason"]


def test_a_damaged_report_of_robustness_is_said_in_words(
    trained: Path, params: config.Params, job: Callable[[str], Job]
) -> None:
    rules = params.section("register").model_copy(update={"max_perturbation_drop": 0.1})
    paths.ROBUSTNESS_REPORT.parent.mkdir(parents=True)
    paths.ROBUSTNESS_REPORT.write_text('{"gri')
    with pytest.raises(DataError, match=r"robustness\.json is missing or damaged"):
        register.run(job("register"), register=rules)
