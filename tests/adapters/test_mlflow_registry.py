"""Registering a real torch policy in a real SQLite registry, and getting it back without a pickle."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nightshift import files, policies
from nightshift.adapters import mlflow_registry, mlflow_tracking
from nightshift.adapters.mlflow_registry import Candidate, Registration
from nightshift.errors import RegistryError

SPEC = {"family": "gaussian_mlp", "inputs": {"objects": 3, "task": 2}, "hidden": [8], "chunk": 1, "action_dim": 7}
MODEL = "test-model"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("registry")
    with files.new_folder(root / "policy") as folder:
        policies.save(policies.build(SPEC), folder)
    return root


@pytest.fixture(autouse=True)
def _store(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root}/mlflow.db")
    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
    monkeypatch.chdir(root)
    yield


def register(root: Path, fingerprint: str, successes: int, grid: str = "grid") -> Registration:
    candidate = Candidate(
        model=MODEL,
        policy=root / "policy",
        fingerprint=fingerprint,
        grid=grid,
        successes=successes,
        episodes=10,
        tags={"dataset.md5": "abc.dir", "code.commit": "1234"},
    )
    return mlflow_registry.register(root, candidate)


def test_the_champion_moves_only_when_better_on_the_same_grid(root: Path) -> None:
    first = register(root, "one", 5)
    assert (first.version, first.aliases) == ("1", ("challenger", "champion"))
    worse = register(root, "two", 5)
    assert (worse.champion, worse.aliases) == ("1", ("challenger",)), "as good is not better"
    assert "version 1 stays" in worse.why
    better = register(root, "three", 6)
    assert (better.champion, better.aliases) == ("3", ("challenger", "champion"))
    elsewhere = register(root, "four", 10, grid="another")
    assert elsewhere.champion == "3"
    assert "another grid" in elsewhere.why


def test_registering_again_after_a_crash_makes_no_second_version(root: Path) -> None:
    before = register(root, "same", 1)
    after = register(root, "same", 1)
    assert before.version == after.version
    tags = mlflow_tracking.connect(root).get_model_version(MODEL, after.version).tags
    assert tags["dataset.md5"] == "abc.dir"
    assert tags[mlflow_registry.GRID] == "grid"


def test_a_loaded_model_acts_as_the_policy_that_was_registered(root: Path) -> None:
    version = register(root, "acting", 0).version
    observations = {"objects": np.ones((4, 3), np.float32), "task": np.zeros((4, 2), np.float32)}
    before = list(sys.path)
    model = mlflow_registry.load(root, MODEL, version)
    actions = policies.load(root / "policy").act(observations)
    np.testing.assert_array_equal(model.predict(observations), actions)
    np.testing.assert_array_equal(mlflow_registry.policy_of(model).act(observations), actions)
    assert sys.path == before


def test_the_model_loads_where_this_package_is_not_installed(root: Path) -> None:
    version = register(root, "alone", 0).version
    store = mlflow_tracking.connect(root)
    location = store.get_model_version_download_uri(MODEL, version)
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


def test_an_unknown_model_version_or_alias_says_what_there_is(root: Path) -> None:
    register(root, "one", 5)
    with pytest.raises(RegistryError, match="has no version or alias 'best'") as error:
        mlflow_registry.load(root, MODEL, "best")
    assert "champion" in error.value.next_step
    with pytest.raises(RegistryError, match="no model 'other' yet"):
        mlflow_registry.load(root, "other", "champion")
