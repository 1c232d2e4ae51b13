"""The stage `opponent` on a real SQLite registry: when the champion is taken from it, and when nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlflow
import pytest
import yaml
from safetensors.torch import load_file, save_file

import nightshift
from nightshift import config, files, policies
from nightshift.adapters import mlflow_registration, mlflow_registry
from nightshift.adapters.mlflow_registration import Proposal
from nightshift.config import merged
from nightshift.envs.fake import FAKE
from nightshift.envs.grid import digest, played_by
from nightshift.errors import ConfigError, RegistryError
from nightshift.pipeline.job import Job
from nightshift.pipeline.predict import predict
from nightshift.project import packages, paths
from nightshift.reports import gate
from nightshift.reports.candidates import read_opponent
from nightshift.reports.gate import Verdict
from nightshift.stages import evaluate, opponent, register
from nightshift.statistics.paired import EpisodeOutcome
from tests.conftest import leave_skipped, small_params
from tests.stages.test_evaluate import ByPolicy, leave


def register_champion(root: Path, model: str, grid: str, code: str = "", **network: Any) -> str:
    """A version that became champion on a grid, by this code or that of now; returns the sha256 of its weights."""
    code = code or played_by(config.Params.model_validate(small_params()).env)
    spec = {"family": "gaussian_mlp", "inputs": {"objects": 3, "task": 2}, "hidden": [16], "chunk": 1, "action_dim": 7}
    with files.new_folder(root / "registered") as folder:
        policies.save(policies.build(spec | network), folder)
    weights = files.sha256(root / "registered" / policies.WEIGHTS)
    solved: EpisodeOutcome = {"task": "near", "init_state": 0, "success": True, "length": 3, "valid": True}
    proposal = Proposal(
        model=model,
        rules=gate.Rules(level=0.05, min_success_rate=0.0, max_task_drop=1.0),
        candidate="sft",
        policy=root / "registered",
        weights=weights,
        fingerprint="before",
        grid=grid,
        code=code,
        outcomes=[solved],
        tags={},
    )
    assert mlflow_registration.register(root, proposal).champion == "1"
    return weights


def forget(key: str, root: Path, model: str) -> None:
    """Make the registered policy.json that of a version of Nightshift which had no such key."""
    with edited_policy(root, model) as folder:
        spec = json.loads((folder / policies.SPEC).read_text())
        del spec[key]
        (folder / policies.SPEC).write_text(json.dumps(spec))


@contextmanager
def edited_policy(root: Path, model: str) -> Iterator[Path]:
    """The folder of the champion's policy; what it has at the end is what was registered."""
    client = mlflow_registry.connect(root)
    stored = Path(mlflow.artifacts.download_artifacts(f"models:/{model}/1"))  # of a local store: where it is
    [path] = stored.rglob(policies.SPEC)
    yield path.parent
    for name, tag in ((policies.SPEC, mlflow_registry.SPEC), (policies.WEIGHTS, mlflow_registry.WEIGHTS)):
        client.set_model_version_tag(model, "1", tag, files.sha256(path.parent / name))


def rename_layers(folder: Path) -> None:
    """As if a version of Nightshift with other names of the layers had saved the weights."""
    weights = load_file(folder / policies.WEIGHTS)
    save_file({f"old.{name}": tensor for name, tensor in weights.items()}, folder / policies.WEIGHTS)


def change_spec(folder: Path, **changes: str) -> None:
    spec = json.loads((folder / policies.SPEC).read_text())
    (folder / policies.SPEC).write_text(json.dumps(spec | changes))


def take(job: Job, **changes: Any) -> config.Params:
    """Run the stage with changed params."""
    params = config.Params.model_validate(merged(small_params(), changes))
    names = ("env", "policy", "evaluate", "register.model")
    opponent.run(job, **{name.replace(".", "_"): params.section(name) for name in names})
    return params


def grid_of(params: config.Params) -> str:
    return digest(params.env, params.evaluate, [])


def is_empty(folder: Path) -> bool:
    return (folder / paths.SKIPPED).exists() and not (folder / policies.WEIGHTS).exists()


def test_nothing_is_taken_where_there_is_no_champion_or_it_has_played_the_grid(
    registry: Path, params: config.Params, job: Callable[[str], Job]
) -> None:
    take(job("opponent"))
    left = files.identity(paths.OPPONENT)
    register_champion(registry, params.section("register").model, grid_of(params))
    take(job("opponent"))
    assert is_empty(paths.OPPONENT)
    assert files.identity(paths.OPPONENT) == left, "so nothing becomes stale"


@pytest.mark.parametrize("changes", [{"evaluate": {"init_states": 7}}, {"env": {"horizon": 13}}])
def test_another_grid_or_another_way_to_play_brings_the_champion_into_the_evaluation(
    registry: Path, params: config.Params, job: Callable[[str], Job], changes: dict[str, Any]
) -> None:
    weights = register_champion(registry, params.section("register").model, grid_of(params))
    take(job("opponent"), **changes)
    found = read_opponent(registry)
    assert found is not None
    assert (found.version, found.weights) == ("1", weights)


def test_another_version_of_the_simulator_brings_the_champion_into_the_evaluation(
    registry: Path, params: config.Params, job: Callable[[str], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    register_champion(registry, params.section("register").model, grid_of(params))
    monkeypatch.setattr(FAKE, "versions", lambda: {"simulator": "2.0"})
    take(job("opponent"))
    assert read_opponent(registry) is not None


def test_other_code_of_the_simulation_brings_the_champion_into_the_evaluation(
    registry: Path, params: config.Params, job: Callable[[str], Job]
) -> None:
    register_champion(registry, params.section("register").model, grid_of(params), code="before the edit")
    take(job("opponent"))
    assert read_opponent(registry) is not None


@pytest.mark.parametrize("edited", ["envs/fake.py", "rollouts/rollout.py"])
def test_an_edit_of_simulators_or_rollouts_is_other_code_and_one_of_policies_is_not(
    params: config.Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edited: str
) -> None:
    package = tmp_path / "nightshift"
    for folder in ("envs", "rollouts", "policies"):
        shutil.copytree(Path(nightshift.__file__).parent / folder, package / folder)
    now = played_by(params.env)
    monkeypatch.setattr(nightshift, "__file__", str(package / "__init__.py"))
    assert played_by(params.env) == now, "a copy is the same code"
    with (package / "policies" / "base.py").open("a") as file:
        file.write("# an edit")
    assert played_by(params.env) == now
    with (package / edited).open("a") as file:
        file.write("# an edit")
    assert played_by(params.env) != now


def test_a_champion_that_cannot_play_here_is_left_out_and_the_reason_is_said(
    registry: Path, params: config.Params, job: Callable[[str], Job], capsys: pytest.CaptureFixture[str]
) -> None:
    register_champion(registry, params.section("register").model, "old", inputs={"objects": 4})
    take(job("opponent"))
    assert is_empty(paths.OPPONENT)
    said = " ".join(capsys.readouterr().out.split())
    assert "cannot play this grid: it reads objects of shape [4], and here it is [3]" in said


def test_a_registered_model_that_cannot_play_here_is_refused_before_it_is_played(
    registry: Path, params: config.Params
) -> None:
    register_champion(registry, params.section("register").model, "old", inputs={"objects": 4})
    (registry / paths.PARAMS).write_text(yaml.safe_dump(small_params()))
    with pytest.raises(ConfigError, match="model champion cannot play here: it reads objects of shape"):
        predict(registry, "champion", task="", episodes=1)


def test_the_gate_says_that_the_champion_cannot_play_and_how_the_version_becomes_champion_all_the_same(
    registry: Path, params: config.Params, job: Callable[[str], Job]
) -> None:
    register_champion(registry, params.section("register").model, "old", inputs={"objects": 4})
    leave("sft")
    leave_skipped("rloo")
    leave_skipped("rlpd")
    take(job("opponent"))
    pool = ByPolicy(params.env, [lambda r: True])
    evaluate.run(replace(job("evaluate"), pool=lambda _: pool), env=params.env, evaluate=params.evaluate)
    register.run(job("register"), register=params.section("register"))
    receipt = json.loads(paths.RECEIPT.read_text())
    assert (receipt["champion"], receipt["verdict"]) == ("1", Verdict.NOT_COMPARED)
    assert receipt["reason"] == (
        "version 2 (sft) stays challenger: it solved 20 of 20 states, but version 1 cannot play this grid (it reads "
        "objects of shape [4], and here it is [3]), so it cannot be told whether it is better; nightshift promote 2 "
        "makes it champion"
    )


def test_a_champion_of_another_version_of_nightshift_is_left_out_after_a_nights_training(
    registry: Path, params: config.Params, job: Callable[[str], Job], capsys: pytest.CaptureFixture[str]
) -> None:
    model = params.section("register").model
    register_champion(registry, model, "old")
    forget("hidden", registry, model)
    take(job("opponent"))
    assert is_empty(paths.OPPONENT)
    said = " ".join(capsys.readouterr().out.split())
    assert "cannot play this grid: the description of this policy is none of the family gaussian_mlp" in said
    assert "missing 1 required keyword-only argument: 'hidden'" in said


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (rename_layers, "policy.safetensors has not the weights of the gaussian_mlp policy"),
        (partial(change_spec, family="rnn"), "unknown policy family 'rnn'"),
        (partial(change_spec, family="rnn", package="rnn-policies 1.0"), "needs the package rnn-policies 1.0"),
    ],
)
def test_a_champion_that_cannot_be_loaded_here_any_more_is_left_out_after_a_nights_training(
    registry: Path, params: config.Params, job: Callable[[str], Job], edit: Callable[[Path], None], reason: str
) -> None:
    model = params.section("register").model
    register_champion(registry, model, "old")
    with edited_policy(registry, model) as folder:
        edit(folder)
    take(job("opponent"))
    assert is_empty(paths.OPPONENT)
    why = json.loads((paths.OPPONENT / paths.SKIPPED).read_text())[config.CHAMPION_LEFT_OUT]["why"]
    assert reason in why
    assert str(registry) not in why, "a champion that MLflow downloads is in another folder every time"


def test_a_champion_whose_weights_are_damaged_is_an_error(
    registry: Path, params: config.Params, job: Callable[[str], Job]
) -> None:
    model = params.section("register").model
    register_champion(registry, model, "old")
    stored = Path(mlflow.artifacts.download_artifacts(f"models:/{model}/1"))
    [weights] = stored.rglob(policies.WEIGHTS)
    rename_layers(weights.parent)
    with pytest.raises(RegistryError, match="is damaged: its sha256 is not the registered one"):
        take(job("opponent"))


def test_a_compute_node_takes_nothing(
    registry: Path, params: config.Params, job: Callable[[str], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    register_champion(registry, params.section("register").model, "old")
    monkeypatch.setenv(packages.AS_COMPUTE_NODE, "1")
    take(job("opponent"))
    assert is_empty(paths.OPPONENT)


def test_the_champion_and_the_challenger_play_the_same_new_grid_and_the_gate_compares_them(
    registry: Path, params: config.Params, job: Callable[[str], Job]
) -> None:
    model = params.section("register").model
    register_champion(registry, model, "old")
    leave("sft")
    leave_skipped("rloo")
    leave_skipped("rlpd")
    take(job("opponent"))
    pool = ByPolicy(params.env, [lambda r: True, lambda r: r.init_state < 6])  # the clone, then the champion
    evaluate.run(replace(job("evaluate"), pool=lambda _: pool), env=params.env, evaluate=params.evaluate)
    report = json.loads(paths.EVALUATION_REPORT.read_text())
    assert [result["name"] for result in report["candidates"]] == ["sft"], "the champion is no candidate"
    assert (report["champion"]["version"], report["champion"]["overall"]["successes"]) == ("1", 12)
    assert (report["champion"]["best_gain"]["won"], report["champion"]["best_gain"]["lost"]) == (8, 0)
    register.run(job("register"), register=params.section("register"))
    receipt = json.loads(paths.RECEIPT.read_text())
    assert (receipt["version"], receipt["champion"], receipt["p_value"]) == ("2", "2", 2**-8)
    assert "of 20 states valid for both it solved 8 that version 1 failed" in receipt["reason"]
    take(job("opponent"))
    assert is_empty(paths.OPPONENT), "the new champion has played this grid"
