"""Stages where ray, prefect, dvc, mlflow and git are missing: they run and resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from nightshift.project import paths
from tests.compute_node import Node, make_site
from tests.conftest import edit, make_project

STAGES = ["states", "collect", "dataset", "sft", "rloo", "evaluate"]
"""All that need no registry."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_site(tmp_path_factory.mktemp("packages") / "site")


@pytest.fixture
def node(site: Path, tmp_path: Path) -> Node:
    """A node that got the files of a small project and has run nothing."""
    node = Node(tmp_path / "node", site)
    node.receive(make_project(tmp_path / "project"))
    edit(node.root, "sft", steps=20)
    edit(node.root, "rloo", iterations=1)
    edit(node.root, "evaluate", init_states=2)
    return node


def refused(node: Node, *arguments: str) -> str:
    done = node.run(*arguments)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_the_node_lacks_what_the_pipeline_needs(node: Node) -> None:
    for package in ("ray", "prefect", "dvc", "mlflow", "git", "gymnasium", "pynvml"):
        done = node.python(f"import {package}.anything")
        assert f"No module named '{package}" in done.stderr


def test_stages_and_commands_import_none_of_it(node: Node) -> None:
    modules = ", ".join(["nightshift.cli.app", *(f"nightshift.stages.{stage}" for stage in STAGES)])
    done = node.python(f"import {modules}")
    assert done.returncode == 0, done.stderr


def test_every_stage_runs_in_order_and_leaves_its_metrics_in_a_file(node: Node) -> None:
    for stage in STAGES:
        done = node.run("stage", stage)
        assert done.returncode == 0, done.stderr
    assert (node.root / paths.EVALUATION_REPORT).exists()
    assert list((node.root / paths.METRICS).glob("rloo-*.jsonl"))


def test_simulators_and_ranks_on_ray_are_refused_before_any_work(node: Node) -> None:
    assert node.run("stage", "states").returncode == 0
    edit(node.root, "machine", workers=2)
    message = refused(node, "stage", "collect")
    assert "machine.workers is 2, and ray is not installed here" in message
    assert "set machine.workers: 0 in params.yaml, or pip install -e '.[pipeline]'" in message


def test_registering_says_that_it_needs_mlflow(node: Node) -> None:
    message = refused(node, "stage", "register")
    assert "this needs the package mlflow, which is not installed here" in message
    assert "pip install -e '.[pipeline]'" in message


def test_a_package_that_a_stage_computes_with_is_missed_before_it_works(node: Node, tmp_path: Path) -> None:
    without = Node(node.root, make_site(tmp_path / "site", "scipy"))
    assert "this needs the package scipy, which is not installed here" in refused(without, "stage", "rloo")
    assert not (node.root / paths.STATE / "rloo").exists()
