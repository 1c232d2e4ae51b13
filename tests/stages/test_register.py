from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nightshift import config, files, policies
from nightshift.adapters import mlflow_registry, mlflow_tracking
from nightshift.errors import DataError
from nightshift.pipeline.job import Job
from nightshift.project import paths
from nightshift.stages import register
from nightshift.statistics.intervals import Rate
from tests.conftest import add_store

SPEC = {"family": "gaussian_mlp", "inputs": {"objects": 3}, "hidden": [4], "chunk": 1, "action_dim": 7}


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
    results = [
        {"name": name, "label": name.upper(), "overall": Rate(count, 198).to_json(), "invalid": 2, "tasks": {}}
        for name, count in solved.items()
    ]
    report = {"grid": {"digest": "g1"}, "best": max(solved, key=lambda name: solved[name]), "candidates": results}
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
    assert registered(job("register"), params) == receipt, "registering again changes nothing"


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
