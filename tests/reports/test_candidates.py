"""Candidates and their histories, as training stages leave them."""

from __future__ import annotations

from pathlib import Path

import pytest

from nightshift import files
from nightshift.errors import DataError
from nightshift.project import paths
from nightshift.reports import history
from nightshift.reports.candidates import candidates
from nightshift.statistics.intervals import Rate

HISTORY = {
    "algorithm": "rloo_batch",
    "iterations": [{"rollout/success": 0.4, "update/kl": 0.01}, {"rollout/success": 0.6}],
    "validation": [
        {"iteration": 0, "successes": 31, "episodes": 40},
        {"iteration": 2, "successes": 35, "episodes": 40},
    ],
    "kept": 2,
}


def leave(root: Path, name: str, content: object = None) -> None:
    with files.new_folder(root / "models" / name) as folder:
        if content is not None:
            files.write_json(folder / "history.json", content)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    deps = "[src/nightshift/policies, models/zeta, models/alpha, data/dataset]"
    (tmp_path / "dvc.yaml").write_text(f"stages: {{evaluate: {{cmd: evaluate, deps: {deps}}}}}")
    leave(tmp_path, "alpha", HISTORY)
    leave(tmp_path, "zeta")
    leave(tmp_path, "leftover")
    return tmp_path


def test_candidates_are_the_policy_inputs_of_evaluate_in_the_order_of_dvc_yaml(root: Path) -> None:
    found = candidates(root)
    assert [candidate.name for candidate in found] == ["zeta", "alpha"], "a folder of an old stage is not evaluated"
    assert [candidate.folder for candidate in found] == [root / "models/zeta", root / "models/alpha"]


def test_a_training_stage_that_was_skipped_has_no_candidate(root: Path) -> None:
    with files.new_folder(root / "models/alpha") as folder:
        files.write_json(folder / paths.SKIPPED, {"skipped": "not in algorithms"})
    assert [candidate.name for candidate in candidates(root)] == ["zeta"]


def test_the_label_is_the_algorithm_of_the_history_or_the_name_of_the_folder(root: Path) -> None:
    assert [candidate.label for candidate in candidates(root)] == ["ZETA", "RLOO BATCH"]


def test_a_history_has_metrics_by_iteration_validated_rates_and_the_kept_iteration(root: Path) -> None:
    without, found = (candidate.history for candidate in candidates(root))
    assert without is None
    assert found is not None
    assert found.metric("rollout/success") == {1: 0.4, 2: 0.6}
    assert found.metric("update/kl") == {1: 0.01}
    assert found.validation == {0: Rate(31, 40), 2: Rate(35, 40)}
    assert found.kept == 2


@pytest.mark.parametrize("content", [[{"rollout/success": 0.5}], {"iterations": []}, "text"])
def test_a_file_that_is_not_a_history_is_named_with_the_next_step(tmp_path: Path, content: object) -> None:
    leave(tmp_path, "rloo", content)
    with pytest.raises(DataError, match=r"history\.json is damaged or not a history") as error:
        history.read(tmp_path / "models/rloo")
    assert error.value.next_step.startswith("rm -r ")


def test_a_candidate_that_is_missing_is_named(root: Path) -> None:
    (root / "models/alpha/manifest.json").unlink()
    with pytest.raises(DataError, match=r"alpha/manifest\.json is missing"):
        candidates(root)
