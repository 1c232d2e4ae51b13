"""`nightshift sweep` on a real Ray cluster of two nodes with room for one trial each; the head has room for none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from nightshift.adapters import model_versions
from nightshift.project import paths
from tests import ray_cluster
from tests.conftest import add_store, edit, make_project, nightshift
from tests.faults.conftest import adding_nodes


@pytest.fixture
def two_nodes(forking: dict[str, Any]) -> Iterator[None]:
    with ray_cluster.cluster(num_cpus=0, **forking) as cluster, adding_nodes(cluster, forking) as add_node:
        add_node(1)
        add_node(1)
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("two_nodes")
def test_trials_run_on_two_nodes_at_the_same_time_and_are_compared_in_mlflow(
    tmp_path: Path, migrated_store: Path
) -> None:
    """In a project that has not run yet: no experiment is in MLflow, and nothing in the cache."""
    root = make_project(tmp_path / "project")
    add_store(root, migrated_store)
    edit(root, "machine", workers=0)
    done = nightshift(root, "sweep", "sft.steps=20,40")
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (model_versions.find_run(root, f"sft.steps={steps}") for steps in (20, 40))
    assert first.success is not None
    assert second.success is not None
    assert all(run.run_id[:8] in done.stdout for run in (first, second)), "the table links to MLflow"
    runs = MlflowClient(f"sqlite:///{root / paths.MLFLOW_DATABASE}")
    spans = [runs.get_run(run.run_id).info for run in (first, second)]
    here = (root / paths.MLFLOW_ARTIFACTS).as_uri()
    assert all(span.artifact_uri.startswith(here) for span in spans), "and not in the clone of a trial"
    assert max(span.start_time for span in spans) < min(span.end_time for span in spans), "side by side"
    compared = nightshift(root, "compare", first.run_id[:8], second.run_id[:8])
    assert "sft.steps" in compared.stdout, compared.stderr
