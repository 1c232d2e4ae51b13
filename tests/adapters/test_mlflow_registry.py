"""Registering a real torch policy in a real SQLite registry, and getting it back without a pickle."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import grimp
import mlflow
import numpy as np
import pytest
from mlflow.tracking import MlflowClient

from nightshift import config, files, policies
from nightshift.adapters import mlflow_registration, mlflow_registry, mlflow_tracking, model_versions
from nightshift.adapters.mlflow_registration import SHIPPED, LeftOut, Proposal, Registration, Rematch
from nightshift.adapters.mlflow_registry import load
from nightshift.adapters.mlflow_tracking import Tracking
from nightshift.config import CHAMPION
from nightshift.errors import DataError, RegistryError
from nightshift.project import paths
from nightshift.project.environment import NO_TELEMETRY
from nightshift.reports import gate
from nightshift.reports.gate import Verdict
from nightshift.statistics.paired import EpisodeOutcome
from tests import servers
from tests.conftest import make_project
from tests.policies import examples
from tests.ports import free_port

SPEC = {"family": "gaussian_mlp", "inputs": {"objects": 3, "task": 2}, "hidden": [8], "chunk": 1, "action_dim": 7}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("registry")


@pytest.fixture(autouse=True)
def _store(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root}/mlflow.db")
    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
    monkeypatch.chdir(root)
    yield


@pytest.fixture
def model(request: pytest.FixtureRequest) -> str:
    """A registered model of its own for every test; making a store anew would take seconds."""
    return str(request.node.name).partition("[")[0]


def pyfunc(root: Path, model: str, version: str) -> Any:
    """The model as a program without this package loads it."""
    location = mlflow_tracking.connect(root).get_model_version_download_uri(model, version)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))  # MLflow puts the model's own copy of our code first
        return mlflow.pyfunc.load_model(location)


def stored_files(root: Path, model: str, version: str, pattern: str) -> list[Path]:
    location = mlflow_tracking.connect(root).get_model_version_download_uri(model, version)
    return list(Path(urlparse(location).path).rglob(pattern))


def trained(root: Path, name: str) -> Path:
    """A policy folder; the same name is the same weights."""
    path = root / "policies" / name
    if not path.exists():
        with files.new_folder(path) as folder:
            policies.save(policies.build(SPEC), folder)
    return path


def episodes(results: str) -> list[EpisodeOutcome]:
    """One per letter: s solved, f failed, i invalid."""
    return [
        {"task": "near", "init_state": i, "success": letter == "s", "length": 9, "valid": letter != "i"}
        for i, letter in enumerate(results)
    ]


def proposal(root: Path, model: str, fingerprint: str, results: str, **changes: Any) -> Proposal:
    policy = trained(root, changes.pop("policy", f"{model}-{fingerprint}"))
    made = Proposal(
        model=model,
        rules=gate.Rules(level=0.05, min_success_rate=0.0, max_task_drop=1.0),
        candidate="rloo",
        policy=policy,
        weights=files.sha256(policy / policies.WEIGHTS),
        fingerprint=fingerprint,
        grid="grid",
        code="code",
        outcomes=episodes(results),
        tags={"dataset.md5": "abc.dir", "code.commit": "1234"},
    )
    return replace(made, **changes)


def register(root: Path, model: str, fingerprint: str, results: str, **changes: Any) -> Registration:
    return mlflow_registration.register(root, proposal(root, model, fingerprint, results, **changes))


def tags_of(root: Path, done: Registration) -> dict[str, str]:
    return dict(mlflow_tracking.connect(root).get_model_version(done.model, done.version).tags)


def test_the_champion_moves_only_to_a_version_that_the_paired_test_calls_better(root: Path, model: str) -> None:
    first = register(root, model, "one", "sssss" + "f" * 5)
    assert (first.version, first.aliases) == ("1", ("challenger", "champion"))
    more = register(root, model, "two", "s" * 9 + "f")  # four states more: p = 1/16
    assert (more.champion, more.aliases, more.p_value) == ("1", ("challenger",), 1 / 16)
    assert "cannot be told whether it is better than version 1" in more.reason
    better = register(root, model, "three", "s" * 10)  # five: p = 1/32
    assert (better.champion, better.aliases, better.p_value) == ("3", ("challenger", "champion"), 1 / 32)
    assert better.reason == (
        "version 3 (rloo) becomes champion: of 10 states valid for both it solved 5 that version 1 failed "
        "and failed 0 that version 1 solved (exact p = 0.0312, level 0.05)"
    )
    elsewhere = register(root, model, "four", "s" * 10, grid="another")
    assert (elsewhere.champion, elsewhere.p_value) == ("3", None)
    assert "but version 3 was not evaluated on this grid" in elsewhere.reason


def test_188_of_200_does_not_replace_187_of_190(root: Path, model: str) -> None:
    register(root, model, "one", "s" * 187 + "f" * 3 + "i" * 10)
    later = register(root, model, "two", "s" * 188 + "f" * 12)
    assert later.champion == "1"
    assert "cannot be told" in later.reason
    assert "of 190 states valid for both it solved 1 that version 1 failed and failed 0" in later.reason


def test_one_episode_more_does_not_replace_the_champion(root: Path, model: str) -> None:
    register(root, model, "one", "s" * 187 + "f" * 13)
    later = register(root, model, "two", "s" * 188 + "f" * 12)
    assert later.champion == "1"
    assert "cannot be told" in later.reason


def test_a_version_carries_its_numbers_and_the_reason_as_tags(root: Path, model: str) -> None:
    register(root, model, "one", "fffff" + "s" * 5)
    done = register(root, model, "two", "s" * 7 + "fi" + "s", candidate="sft")
    tags = tags_of(root, done)
    expected = {
        mlflow_registry.CANDIDATE: "sft",
        mlflow_registry.GRID: "grid",
        mlflow_registry.SUCCESSES: "8",
        mlflow_registry.EPISODES: "9",
        mlflow_registry.INVALID: "1",
        mlflow_registry.LEVEL: "0.05",
        mlflow_registry.P_VALUE: repr(done.p_value),
        mlflow_registry.REASON: done.reason,
        "dataset.md5": "abc.dir",
    }
    assert expected.items() <= tags.items()
    assert done.p_value == 7 / 64  # five won and one lost


def test_registering_again_makes_no_second_version_and_no_second_promotion(root: Path, model: str) -> None:
    before = register(root, model, "same", "ssf")
    assert before.verdict is Verdict.PROMOTED
    assert register(root, model, "same", "ssf") == replace(before, verdict=Verdict.CHAMPION_ALREADY)


def test_a_promotion_whose_run_was_killed_before_it_could_tell_is_told_by_the_run_that_resumes_it(
    root: Path, model: str, tmp_path: Path
) -> None:
    params = config.load(make_project(tmp_path / "project") / "params.yaml")
    fingerprint = f"{model}-killed"
    killed = Tracking(root, params, "abc", model)
    run_id = killed._begin("register", fingerprint, {}).info.run_id
    before = register(root, model, fingerprint, "ssf")
    assert (before.run_id, before.verdict) == (run_id, Verdict.PROMOTED)
    again = Tracking(root, params, "abc", model)
    with again.stage("register", fingerprint, {}) as tracker:
        assert (tracker.run_id, again.parent_id) == (run_id, killed.parent_id)
        assert register(root, model, fingerprint, "ssf") == before
    assert tags_of(root, before)[mlflow_registry.PREVIOUS] == ""
    assert register(root, model, fingerprint, "ssf").verdict is Verdict.CHAMPION_ALREADY


def test_a_version_is_logged_under_the_run_of_its_own_folder(root: Path, model: str, tmp_path: Path) -> None:
    projects = [make_project(tmp_path / name) for name in ("one", "other")]
    sessions = [Tracking(project, config.load(project / "params.yaml"), "abc", model) for project in projects]
    mine, theirs = (session._begin("register", model, {}).info.run_id for session in sessions)
    done = mlflow_registration.register(projects[0], proposal(root, model, model, "s"))
    assert (done.run_id, theirs != mine) == (mine, True)


@pytest.mark.parametrize(
    ("step", "argument"),
    [
        ("set_registered_model_alias", mlflow_registry.CHALLENGER),
        ("set_model_version_tag", mlflow_registry.REASON),
        ("set_registered_model_alias", CHAMPION),
    ],
)
def test_a_registration_that_died_between_two_steps_is_completed_by_the_next(
    root: Path, model: str, monkeypatch: pytest.MonkeyPatch, step: str, argument: str
) -> None:
    model = f"{model}-{argument}"
    register(root, model, "one", "s" + "f" * 9)
    real = getattr(MlflowClient, step)

    def dies(self: MlflowClient, *arguments: str) -> None:
        if argument in arguments:
            raise KeyboardInterrupt
        real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, step, dies)
        with pytest.raises(KeyboardInterrupt):
            register(root, model, "two", "s" * 10)
    done = register(root, model, "two", "s" * 10)
    assert (done.version, done.champion, done.aliases) == ("2", "2", ("challenger", "champion"))
    assert tags_of(root, done)[mlflow_registry.REASON] == done.reason


def test_the_same_weights_are_found_and_not_registered_again(root: Path, model: str) -> None:
    clone = register(root, model, "one", "sssff", policy="clone", candidate="sft")
    again = register(root, model, "two", "sssff", policy="clone", candidate="sft")
    assert (again.version, again.champion) == (clone.version, "1")
    assert again.reason == (
        "version 1 (sft) stays champion: the best candidate of this evaluation, which solved 3 of 5 states, "
        "has the same weights"
    )
    assert tags_of(root, again)[mlflow_registry.REASON] == clone.reason, "the registry says how it became champion"


def test_the_same_weights_on_a_new_grid_can_be_compared_on_it_from_then_on(root: Path, model: str) -> None:
    register(root, model, "one", "s" + "f" * 9, policy="old")
    register(root, model, "two", "s" + "f" * 9, policy="old", grid="new")
    assert "cannot be told" in register(root, model, "three", "s" * 5 + "f" * 5, grid="new").reason
    assert register(root, model, "four", "s" * 10, grid="new").champion == "3"


def test_a_champion_that_played_the_new_grid_in_the_same_evaluation_is_compared_on_it(root: Path, model: str) -> None:
    first = register(root, model, "one", "sssss" + "f" * 5)
    weights = proposal(root, model, "one", "s").weights
    rematch = Rematch(version=first.version, weights=weights, outcomes=episodes("ss" + "f" * 8))
    better = register(root, model, "two", "s" * 10, grid="new", rematch=rematch)
    assert (better.champion, better.p_value) == ("2", 2**-8)
    champion = mlflow_tracking.connect(root).get_model_version(model, "1")
    assert (champion.tags[mlflow_registry.GRID], champion.tags[mlflow_registry.SUCCESSES]) == ("new", "2")
    assert champion.tags[mlflow_registry.REASON] == first.reason, "how it became champion stays on record"


def test_outcomes_by_other_code_are_not_compared_until_the_champion_has_played_with_this_one(
    root: Path, model: str
) -> None:
    register(root, model, "one", "sssss" + "f" * 5)
    later = register(root, model, "two", "s" * 10, code="edited")
    assert (later.champion, later.p_value, later.verdict) == ("1", None, gate.Verdict.NOT_COMPARED)
    assert "version 1 was not evaluated on this grid of init states by this code" in later.reason
    assert later.reason.endswith("nightshift run --force-stage evaluate lets both play it")
    rematch = Rematch(version="1", weights=proposal(root, model, "one", "s").weights, outcomes=episodes("f" * 10))
    again = register(root, model, "three", "s" * 10, code="edited", rematch=rematch)
    assert (again.champion, again.p_value) == (again.version, 2**-10)
    champion = mlflow_tracking.connect(root).get_model_version(model, "1")
    assert champion.tags[mlflow_registry.SUCCESSES] == "0", "its newest evaluation"


def test_outcomes_from_before_the_digest_of_the_code_are_compared_with_one_another_and_with_no_others(
    root: Path, model: str
) -> None:
    first = register(root, model, "one", "sssss" + "f" * 5)
    kept = {"episodes": episodes("sssss" + "f" * 5)}
    mlflow_tracking.connect(root).log_dict(first.run_id, kept, f"{mlflow_registry.OUTCOMES}/grid.json")
    assert register(root, model, "two", "s" * 10).verdict is gate.Verdict.NOT_COMPARED
    assert register(root, model, "three", "s" * 10, code=mlflow_registry.UNKNOWN_CODE).p_value == 2**-5


def test_why_a_champion_was_left_out_is_not_said_of_the_one_that_replaced_it_meanwhile(root: Path, model: str) -> None:
    register(root, model, "one", "sssss" + "f" * 5)
    left_out = LeftOut(version="1", why="no camera")
    later = register(root, model, "two", "s" * 10, grid="new", left_out=left_out)
    assert "version 1 cannot play this grid (no camera)" in later.reason
    model_versions.promote(root, model, "2")
    last = register(root, model, "three", "s" * 10, grid="newer", left_out=left_out)
    assert "version 2 was not evaluated on this grid" in last.reason
    assert "no camera" not in last.reason


def test_outcomes_of_other_weights_are_not_taken_for_the_champions(root: Path, model: str) -> None:
    register(root, model, "one", "sssss" + "f" * 5)
    stranger = Rematch(version="1", weights="of another registry", outcomes=episodes("f" * 10))
    later = register(root, model, "two", "s" * 10, grid="new", rematch=stranger)
    assert (later.champion, later.p_value) == ("1", None)
    assert "version 1 was not evaluated on this grid" in later.reason


def test_a_champion_that_was_deleted_after_it_played_does_not_keep_the_winner_from_being_registered(
    root: Path, model: str
) -> None:
    first = register(root, model, "one", "sssss" + "f" * 5)
    rematch = Rematch(
        version=first.version, weights=proposal(root, model, "one", "s").weights, outcomes=episodes("f" * 10)
    )
    mlflow_tracking.connect(root).delete_model_version(model, first.version)
    later = register(root, model, "two", "s" * 10, grid="new", rematch=rematch)
    assert (later.version, later.champion) == ("2", "2")


def test_a_registration_that_died_before_the_gate_and_was_promoted_by_hand_can_be_repeated(
    root: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(mlflow_registration, "_decide", dies)
        with pytest.raises(KeyboardInterrupt):
            register(root, model, "one", "s" * 10)
    model_versions.promote(root, model, "1")
    again = register(root, model, "one", "s" * 10)
    assert (again.champion, again.p_value) == ("1", None)
    assert again.reason.startswith("version 1 was promoted by hand on 20")


@pytest.mark.parametrize("promoted", ["2", "3"])
def test_a_version_that_a_person_promotes_while_the_gate_compares_is_the_one_to_beat(
    root: Path, model: str, monkeypatch: pytest.MonkeyPatch, promoted: str
) -> None:
    """Another version, or the one that is being registered."""
    model = f"{model}-{promoted}"
    register(root, model, "one", "sssss" + "f" * 5)
    register(root, model, "two", "s" * 9 + "f")
    compare = gate.compare

    def promoted_meanwhile(*arguments: Any) -> gate.Decision:
        model_versions.promote(root, model, promoted)
        return compare(*arguments)

    monkeypatch.setattr(gate, "compare", promoted_meanwhile)
    done = register(root, model, "three", "s" * 10)
    assert (done.version, done.champion) == ("3", promoted)
    told = {"2": "cannot be told whether it is better than version 2", "3": "version 3 was promoted by hand on 20"}
    assert told[promoted] in done.reason
    assert tags_of(root, done)[mlflow_registry.REASON] == done.reason


def test_a_policy_that_solves_nothing_is_registered_and_leaves_the_model_without_a_champion(
    root: Path, model: str
) -> None:
    nothing = register(root, model, "one", "f" * 10)
    assert (nothing.aliases, nothing.champion) == (("challenger",), "")
    assert nothing.reason.startswith("version 1 (rloo) stays challenger: it solved 0 of 10 states")
    assert mlflow_registry.champion(root, model) is None
    assert register(root, model, "two", "s" + "f" * 9).champion == "2"


def test_registering_a_version_of_the_past_again_moves_no_alias_backwards(root: Path, model: str) -> None:
    register(root, model, "one", "sssss" + "f" * 5)
    register(root, model, "two", "s" * 10)
    again = register(root, model, "one", "sssss" + "f" * 5)
    aliases = mlflow_tracking.connect(root).get_registered_model(model).aliases
    assert {alias: str(version) for alias, version in aliases.items()} == {"challenger": "2", "champion": "2"}
    assert (again.version, again.champion, again.aliases) == ("1", "2", ())
    assert again.reason == (
        "version 1 (rloo) was registered before version 2: only nightshift promote moves an alias to an older version"
    )


def test_the_champion_knows_its_grids_and_hands_out_its_weights_and_no_others(root: Path, model: str) -> None:
    register(root, model, "one", "s" * 10)
    champion = mlflow_registry.champion(root, model)
    assert champion is not None
    assert (champion.has_played("grid", "code"), champion.has_played("other", "code")) == (True, False)
    assert not champion.has_played("grid", "other code")
    assert dict(champion.policy().shapes) == {"objects": (3,), "task": (2,)}
    (root / model).mkdir()
    champion.copy_policy(root / model)
    assert files.sha256(root / model / policies.WEIGHTS) == proposal(root, model, "one", "s").weights
    mlflow_tracking.connect(root).set_model_version_tag(model, "1", mlflow_registry.WEIGHTS, "0" * 64)
    damaged = mlflow_registry.champion(root, model)
    assert damaged is not None
    for read in (lambda: damaged.copy_policy(root / model), damaged.policy, lambda: load(root, model, "1")):
        with pytest.raises(RegistryError, match=r"the policy.safetensors of version 1 of .* is damaged"):
            read()


def test_a_loaded_policy_acts_as_the_one_that_was_registered(root: Path, model: str) -> None:
    version = register(root, model, "acting", "s", policy="acting").version
    observations = {"objects": np.ones((4, 3), np.float32), "task": np.zeros((4, 2), np.float32)}
    actions = policies.load(trained(root, "acting")).act(observations)
    np.testing.assert_array_equal(pyfunc(root, model, version).predict(observations), actions)
    np.testing.assert_array_equal(mlflow_registry.load(root, model, version).act(observations), actions)


@pytest.mark.parametrize("name", [policies.WEIGHTS, policies.SPEC])
def test_a_policy_that_was_changed_in_the_store_is_refused(root: Path, model: str, name: str) -> None:
    version = register(root, model, name, "s", policy=f"other {name}").version
    (stored,) = stored_files(root, model, version, name)
    stored.write_bytes(stored.read_bytes() + b" ")
    with pytest.raises(RegistryError, match=f"the {name} of version {version} of .* is damaged: its sha256"):
        mlflow_registry.load(root, model, version)


def test_a_version_of_an_older_nightshift_is_refused_for_what_it_is_and_can_be_registered_again(
    root: Path, model: str
) -> None:
    client = mlflow_tracking.connect(root)
    old = register(root, model, "one", "s").version
    client.delete_model_version_tag(model, old, mlflow_registry.SPEC)
    with pytest.raises(RegistryError, match=r"was registered by an older Nightshift, without the sha256") as refused:
        mlflow_registry.load(root, model, old)
    assert "--force-stage register" in refused.value.next_step
    client.delete_registered_model_alias(model, "champion")
    new = register(root, model, "one", "s")
    assert (new.version, new.champion) == ("2", "2")
    assert mlflow_registry.load(root, model, "champion").action_dim == 7


def test_code_that_was_put_beside_a_policy_in_the_store_is_not_run(root: Path, model: str) -> None:
    version = register(root, model, "code", "s", policy="code").version
    programs = stored_files(root, model, version, "*.py")
    assert "policy_model.py" in [path.name for path in programs]
    for path in programs:
        path.write_text("raise SystemExit('code from the store was run')")
    assert mlflow_registry.load(root, model, version).action_dim == 7


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A store of MLflow whose files have to be downloaded."""
    port = free_port()
    store = ["--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db"]
    artifacts = ["--artifacts-destination", str(tmp_path / "files")]
    command = [sys.executable, "-m", "mlflow", "server", *store, *artifacts, "--port", str(port), "--workers", "1"]
    log, url = tmp_path / "log", f"http://127.0.0.1:{port}"
    with servers.running(command, log, NO_TELEMETRY) as process:
        servers.wait_for(process, lambda: servers.responds(f"{url}/health"), log)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("server")
def test_what_is_downloaded_of_a_remote_store_is_removed_after_use(
    root: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(root, model, "one", "s")
    downloads, elsewhere = root / paths.DOWNLOADS, tmp_path / "tmp"
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    assert load(root, model, "1").action_dim == 7
    assert list(elsewhere.iterdir()) == []
    assert list(downloads.iterdir()) == []
    champion = mlflow_registry.champion(root, model)
    assert champion is not None
    policy = champion.policy()
    copies = list(downloads.rglob(policies.WEIGHTS))
    champion.copy_policy(tmp_path)
    assert list(downloads.rglob(policies.WEIGHTS)) == copies and len(copies) == 1, "it is downloaded once"
    del champion
    assert [*downloads.iterdir(), *elsewhere.iterdir()] == []
    assert policy.act({"objects": np.ones((1, 3), np.float32), "task": np.zeros((1, 2), np.float32)}).shape == (1, 1, 7)


def test_a_local_store_is_read_where_it_is(root: Path, model: str) -> None:
    register(root, model, "one", "s")
    champion = mlflow_registry.champion(root, model)
    assert champion is not None
    assert champion._folder / policies.WEIGHTS in stored_files(root, model, "1", policies.WEIGHTS)


@pytest.mark.slow
def test_the_model_loads_where_this_package_is_not_installed(root: Path, model: str) -> None:
    version = register(root, model, "alone", "s").version
    store = mlflow_tracking.connect(root)
    location = store.get_model_version_download_uri(model, version)
    program = f"""
import sys
from pathlib import Path
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", str(finder))]
sys.path = [entry for entry in sys.path if not (Path(entry) / "nightshift").is_dir()]
import mlflow, numpy as np
model = mlflow.pyfunc.load_model({location!r})
out = model.predict({{"objects": np.ones((2, 3), np.float32), "task": np.zeros((2, 2), np.float32)}})
import nightshift
assert nightshift.__file__.startswith({str(root)!r}), nightshift.__file__
assert out.shape == (2, 1, 7)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr


def test_what_a_policy_imports_of_this_package_travels_with_a_registered_model() -> None:
    """Also what a family imports when it is first used."""
    imports = grimp.build_graph("nightshift", cache_dir=None, exclude_type_checking_imports=True)
    start = [name for name in imports.modules if name.startswith("nightshift.policies")] + [
        "nightshift.adapters.policy_model"
    ]
    needed = {name for module in start for name in imports.find_modules_directly_imported_by(module)}
    ours = {name.split(".")[1] for name in needed if name.startswith("nightshift.")}
    assert ours <= {name.removesuffix(".py") for name in SHIPPED}


def test_an_unknown_model_version_or_alias_says_what_there_is(root: Path, model: str) -> None:
    register(root, model, "one", "s")
    with pytest.raises(RegistryError, match="has no version or alias 'best'") as error:
        mlflow_registry.load(root, model, "best")
    assert error.value.next_step == "choose one of 1, challenger, champion"
    mlflow_registry.connect(root).delete_registered_model_alias(model, "champion")
    with pytest.raises(RegistryError, match="has no version or alias 'champion'") as error:
        mlflow_registry.load(root, model, "champion")
    assert error.value.next_step == "choose one of 1, challenger"
    with pytest.raises(RegistryError, match="no model 'other' yet"):
        mlflow_registry.load(root, "other", "champion")


@pytest.mark.parametrize("family", ["cnn", "vla"])
def test_a_policy_that_sees_is_registered_with_its_images_and_its_instruction(
    root: Path, model: str, family: str
) -> None:
    policy = examples.make(family)
    with files.new_folder(root / "policies" / family) as folder:
        policies.save(policy, folder)
    version = register(root, model, family, "s", policy=family).version
    loaded = pyfunc(root, model, version)
    seen = examples.observe(3)
    assert loaded.metadata.signature.inputs.input_names() == list(policy.shapes)
    np.testing.assert_array_equal(loaded.predict(seen), policy.act(seen))


@pytest.mark.parametrize("family", ["gaussian_mlp", "vla"])
def test_a_model_that_is_not_given_what_its_policy_reads_says_so(family: str) -> None:
    from nightshift.adapters.policy_model import PolicyModel

    model = PolicyModel()
    model.policy = examples.make(family)
    missing = model.policy.observations[-1]
    seen = {name: values for name, values in examples.observe(2).items() if name != missing}
    with pytest.raises(DataError, match=f"the policy reads {missing}, and the observations are"):
        model.predict(None, seen)  # type: ignore[no-untyped-call]
