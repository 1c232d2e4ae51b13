from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nightshift import config, files, policies
from nightshift.adapters import mlflow_registry
from nightshift.errors import DataError
from nightshift.pipeline.job import Job
from nightshift.project import paths
from nightshift.reports.intervals import Rate
from nightshift.stages import register

SPEC = {"family": "gaussian_mlp", "inputs": {"objects": 3}, "hidden": [4], "chunk": 1, "action_dim": 7}


@pytest.fixture
def trained(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose policy is trained and evaluated."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{project}/{paths.MLFLOW_DATABASE}")
    with files.new_folder(paths.RLOO_POLICY) as folder:
        policies.save(policies.build(SPEC), folder)
    result = {"overall": Rate(150, 200).to_json(), "tasks": {}}
    report = {"grid": {"digest": "g1", "suite": "fake", "episodes": 200}, "policies": {"sft": result, "rloo": result}}
    with files.new_folder(paths.EVALUATION) as folder:
        files.write_json(folder / "evaluation.json", report)
    paths.DVC_LOCK.write_text("stages: {dataset: {outs: [{path: data/dataset, md5: abc.dir}]}}")
    return project


def test_the_receipt_tells_version_aliases_and_lineage(
    trained: Path, params: config.Params, job: Callable[[str], Job]
) -> None:
    register.run(job("register"), register=params.section("register"))
    receipt = json.loads(paths.RECEIPT.read_text())
    assert receipt["version"] == "1"
    assert receipt["aliases"] == ["challenger", "champion"]
    assert receipt["tags"]["dataset.md5"] == "abc.dir"
    assert receipt["tags"]["code.commit"] == "abc1234"
    assert receipt["evaluation"]["successes"] == 150
    assert mlflow_registry.load(trained, receipt["model"], "champion")
    register.run(job("register"), register=params.section("register"))
    assert json.loads(paths.RECEIPT.read_text()) == receipt | {"why": "it is the champion, with 150 of 200 episodes"}


def test_a_damaged_evaluation_is_named_and_nothing_is_registered(
    trained: Path, params: config.Params, job: Callable[[str], Job]
) -> None:
    (paths.EVALUATION / "evaluation.json").write_text("{")
    with pytest.raises(DataError, match="is missing or damaged"):
        register.run(job("register"), register=params.section("register"))
    assert not paths.RECEIPT.exists()
