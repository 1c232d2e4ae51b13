"""What of a policy with an adapter MLflow stores, and that each form loads wherever a version is loaded."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch

from nightshift import files, policies
from nightshift.adapters import mlflow_registration, mlflow_registry, mlflow_tracking, model_versions
from nightshift.adapters.mlflow_registration import Proposal, Registration, Rematch
from nightshift.errors import DataError, RegistryError
from nightshift.policies import on_base
from nightshift.project import paths
from nightshift.reports import gate
from tests.adapters.test_mlflow_registry import episodes, pyfunc, stored_files
from tests.policies import examples
from tests.policies.openvla_oft import published
from tests.policies.openvla_oft.test_checkpoint import load, observations

LORA = {"rank": 2, "alpha": 4.0, "targets": ["q_proj", "down_proj"]}
FORMS = ("whole", "adapter", "merged")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, migrated_store: Path) -> Path:
    root = tmp_path_factory.mktemp("registry")
    shutil.copy(migrated_store, root / "mlflow.db")
    published.write(root / "base")
    for number in range(2):
        policy = load(root / "base", lora=LORA)
        torch.manual_seed(number)
        for parameter in policy.network.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.3)
        with files.new_folder(root / "models" / str(number)) as folder:
            policies.save(policy, folder)
    return root


@pytest.fixture(autouse=True)
def _store(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root}/mlflow.db")
    monkeypatch.chdir(root)
    yield


def register(root: Path, model: str, stored: Any, results: str = "s", **changes: Any) -> Registration:
    """Policy number 0 if nothing else is said; what is registered already stays as it is."""
    policy = root / "models" / str(changes.pop("number", 0))
    proposal = Proposal(
        model=model,
        rules=gate.Rules(level=0.05, min_success_rate=0.0, max_task_drop=1.0),
        candidate="rloo",
        policy=policy,
        store_as=stored,
        weights=files.sha256(policy / policies.WEIGHTS),
        fingerprint=f"{model}-{policy.name}",
        grid="grid",
        code="code",
        outcomes=episodes(results),
        tags={},
    )
    return mlflow_registration.register(root, replace(proposal, **changes))


def tags_of(root: Path, done: Registration) -> dict[str, str]:
    return dict(mlflow_tracking.connect(root).get_model_version(done.model, done.version).tags)


@pytest.mark.parametrize("stored", FORMS)
def test_a_version_acts_as_the_policy_that_was_trained_however_it_is_loaded(root: Path, stored: str) -> None:
    """By version, by alias, as a program without this package does, and as the evaluation and the start get it."""
    done = register(root, stored, stored)
    expected = policies.load(root / "models/0").act(observations())
    champion = mlflow_registry.champion(root, done.model)
    assert champion is not None
    copied = root / f"copied-{stored}"
    copied.mkdir()
    champion.copy_policy(copied)
    seen = {name: values for name, values in observations().items() if name in champion.policy().shapes}
    for actions in (
        mlflow_registry.load(root, done.model, "1").act(observations()),
        champion.policy().act(observations()),
        policies.load(copied).act(observations()),
        pyfunc(root, done.model, "1").predict(seen),
    ):
        np.testing.assert_allclose(actions, expected, rtol=0, atol=1e-4 if stored == "merged" else 0)
    tags = tags_of(root, done)
    assert files.sha256(copied / policies.WEIGHTS) == tags[mlflow_registry.WEIGHTS], "an evaluation knows it by these"
    assert files.sha256(copied / policies.SPEC) == tags[mlflow_registry.SPEC]


def test_an_adapter_is_stored_without_its_base_and_a_merged_policy_without_an_adapter(root: Path) -> None:
    names, sizes = {}, {}
    for stored in FORMS:
        done = register(root, stored, stored)
        found = [file for file in stored_files(root, done.model, "1", "*") if "artifacts" in file.parts]
        names[stored] = {file.name for file in found if file.is_file()}
        sizes[stored] = sum(file.stat().st_size for file in found if file.suffix == ".safetensors")
    assert {policies.TRAINED, policies.BASE, policies.SPEC, "adapter_model.safetensors"} <= names["adapter"]
    assert policies.WEIGHTS not in names["adapter"]
    assert sizes["adapter"] < 0.01 * sizes["whole"]
    assert "adapter_model.safetensors" not in names["merged"]
    merged = mlflow_registry.load(root, "merged", "1")
    assert merged.spec["lora"] is None
    assert not any("lora_" in name for name in merged.state_dict())


@pytest.mark.parametrize("fails", [False, True])
def test_a_policy_is_staged_in_the_project_and_nothing_of_it_stays_there(
    root: Path, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By us and by MLflow: it may be larger than the system's temporary folder."""
    made: list[Path] = []
    make, log = tempfile.mkdtemp, mlflow.pyfunc.log_model

    def make_and_note(*args: Any, **kwargs: Any) -> str:
        folder: str = make(*args, **kwargs)
        if mlflow.active_run():
            made.append(Path(folder))
        return folder

    def log_and_note(**kwargs: Any) -> Any:
        made.append(Path(kwargs["artifacts"]["policy"]))
        result = log(**kwargs)
        if fails:
            raise OSError("the store is full")
        return result

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_note)
    monkeypatch.setattr(mlflow.pyfunc, "log_model", log_and_note)
    with pytest.raises(OSError, match="store is full") if fails else contextlib.nullcontext():
        register(root, f"staged-{fails}", "merged")
    state = root / paths.STATE / "register"
    assert len(made) > 1 and all(folder.is_relative_to(state) for folder in made)
    assert not list(state.iterdir())


@pytest.mark.parametrize("stored", ["adapter", "merged"])
def test_the_same_weights_are_registered_once_and_a_champion_is_compared_on_what_it_played(
    root: Path, stored: str
) -> None:
    model = f"compared-{stored}"
    first = register(root, model, stored, "s" * 5 + "f" * 5)
    assert register(root, model, stored, "s" * 5 + "f" * 5, fingerprint="again").version == first.version
    played = tags_of(root, first)[mlflow_registry.WEIGHTS]  # as test_a_version_acts… finds in the folder that plays
    rematch = Rematch(version="1", weights=played, outcomes=episodes("f" * 10))
    better = register(root, model, stored, "s" * 10, number=1, grid="new", rematch=rematch)
    assert (better.version, better.champion) == ("2", "2")
    assert model_versions.rollback(root, model) == ("2", "1")
    champion = mlflow_registry.champion(root, model)
    assert champion is not None
    expected = policies.load(root / "models/0").act(observations())
    np.testing.assert_allclose(champion.policy().act(observations()), expected, rtol=0, atol=1e-4)


def test_robustness_of_a_merged_version_counts_for_the_gate(root: Path) -> None:
    model = "robust"
    first = register(root, model, "merged", "s" * 5 + "f" * 5)
    second = register(root, model, "merged", "s" * 10, number=1)
    ours, theirs = (tags_of(root, done)[mlflow_registry.WEIGHTS] for done in (second, first))
    model_versions.promote(root, model, "1")
    rules = gate.Rules(level=0.05, min_success_rate=0.0, max_task_drop=1.0, max_perturbation_drop=0.1)
    compared = gate.Robustness(ours=ours, theirs=theirs, gains={"noise": 0.0})
    again = register(root, model, "merged", "s" * 10, number=1, rules=rules, robustness=compared)
    assert again.champion == "2", again.reason


def test_a_base_that_is_missing_or_another_one_is_refused_by_its_path(root: Path) -> None:
    done = register(root, "adapter", "adapter")
    base = root / "base"
    base.rename(root / "aside")
    try:
        with pytest.raises(DataError, match=rf"adapter on the published checkpoint {base}: there is no") as refused:
            mlflow_registry.load(root, done.model, "1")
        assert str(base) in refused.value.next_step
        name = "projector.fc1.weight"
        changed = published.weights()[name].clone()
        changed[0, 0] += 1
        published.write(base, {**published.weights(), name: changed})
        with pytest.raises(DataError, match=rf"weights in {base} are not those that the adapter was trained on"):
            mlflow_registry.load(root, done.model, "1")
    finally:
        shutil.rmtree(base, ignore_errors=True)
        (root / "aside").rename(base)
    mlflow_registry.load(root, done.model, "1")


@pytest.mark.parametrize("name", [policies.TRAINED, policies.BASE, policies.SPEC])
def test_an_adapter_that_was_changed_in_the_store_is_refused(root: Path, name: str) -> None:
    done = register(root, "adapter", "adapter")
    (stored,) = stored_files(root, done.model, "1", name)
    before = stored.read_bytes()
    stored.write_bytes(before + b" ")
    with pytest.raises(RegistryError, match=f"the {name} of version 1 of .* is damaged: its sha256"):
        mlflow_registry.load(root, done.model, "1")
    stored.write_bytes(before)


@pytest.mark.parametrize(
    ("stored", "names"), [("whole", [policies.BASE, policies.TRAINED]), ("adapter", [policies.WEIGHTS])]
)
def test_weights_that_were_added_to_the_store_are_refused(root: Path, stored: str, names: list[str]) -> None:
    """Files of another policy, complete: with them another policy would play than the one that was registered."""
    done = register(root, stored, stored)
    (spec,) = stored_files(root, done.model, "1", policies.SPEC)
    other = root / f"other-than-{stored}"
    other.mkdir()
    if stored == "whole":
        on_base.save(policies.load(root / "models/1"), other)
    else:
        shutil.copy(root / "models/1" / policies.WEIGHTS, other)
    champion = mlflow_registry.champion(root, done.model)
    assert champion is not None
    for name in names:
        shutil.copy(other / name, spec.parent)
    try:
        for read in (
            lambda: mlflow_registry.load(root, done.model, "1"),
            champion.policy,
            lambda: champion.copy_policy(other),
        ):
            with pytest.raises(RegistryError, match=f"version 1 of {done.model} has {names[-1]} in MLflow's store"):
                read()
    finally:
        for name in names:
            (spec.parent / name).unlink()
    mlflow_registry.load(root, done.model, "1")


def test_weights_that_are_not_on_the_named_base_are_refused_before_they_are_registered(root: Path) -> None:
    """As those of a policy that began with a champion of another checkpoint."""
    policy = policies.load(root / "models/0")
    other = policy.state_dict()
    name = "network.projector.fc1.weight"
    with files.new_folder(root / "models" / "other") as folder:
        policies.save(policies.build(policy.spec, {**other, name: other[name] + 1}), folder)
    with pytest.raises(DataError, match="are not those that the adapter was trained on"):
        register(root, "never", "adapter", number="other")
    assert not mlflow_registry.versions(mlflow_registry.connect(root), "never")


def test_a_policy_that_does_not_name_its_base_is_not_stored_as_an_adapter(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not say which published checkpoint") as refused:
        on_base.save(examples.make("openvla-oft tokens"), tmp_path)
    assert "register.weights: whole" in refused.value.next_step


def test_the_reference_has_the_path_and_the_sha256_of_the_weights_that_are_not_trained(root: Path) -> None:
    done = register(root, "adapter", "adapter")
    (file,) = stored_files(root, done.model, "1", policies.BASE)
    found = json.loads(file.read_text())
    assert (found["path"], found["adapter"]) == (str(root / "base"), None)
    assert len(found["sha256"]) == 64
