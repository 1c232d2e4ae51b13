"""The driver of reinforcement learning on Ray is killed while its workers play: nothing is lost, no process is left."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nightshift.pipeline.run import Session, run_stage
from nightshift.project import paths
from tests.conftest import add_store, edit, make_project
from tests.faults.conftest import AddNode
from tests.faults.test_interrupt import inhabitants
from tests.faults.test_kill_and_resume import checkpoints, kill_after_new_checkpoint
from tests.rollouts.test_pool import worker_pids

ITERATIONS = 12
MOMENTS = (0.0, 0.07)
"""Seconds after a checkpoint: at once, and when the next iteration is being played."""
SECONDS = 60

Outcome = tuple[bytes, bytes]
"""Weights and history."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, migrated_store: Path) -> Path:
    root = make_project(tmp_path_factory.mktemp("driver") / "project")
    add_store(root, migrated_store)
    edit(root, "rloo", iterations=ITERATIONS, groups=16)
    return root


@pytest.fixture(scope="module")
def undisturbed(project: Path) -> Outcome:
    completed(project, "states", "collect", "dataset", "start", "sft", "choose", "rloo")
    history = json.loads((project / paths.RLOO_HISTORY).read_text())["iterations"]
    learned = [iteration["update/loss"] for iteration in history]
    assert any(learned), "nothing was learned: the test would show nothing"
    return outcome(project)


def outcome(root: Path) -> Outcome:
    return (root / paths.RLOO_POLICY / "policy.safetensors").read_bytes(), (root / paths.RLOO_HISTORY).read_bytes()


def completed(root: Path, *stages: str) -> Outcome:
    """To the end, in this process and without Ray, which is sooner there."""
    edit(root, "machine", workers=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root / paths.MLFLOW_DATABASE}")
        with Session(root) as session:
            for stage in stages:
                run_stage(stage, session)
    return outcome(root)


def start_over(root: Path) -> None:
    edit(root, "machine", workers=2)
    shutil.rmtree(root / paths.RLOO_POLICY)
    for step in (root / ".state" / "rloo").glob("*/step-*"):
        shutil.rmtree(step)


def kill_and_complete(root: Path, who_is_left: Callable[[], list[Any]]) -> Outcome:
    start_over(root)
    seen: list[Any] = []
    for moment in MOMENTS:  # the second driver resumes, on Ray, what the first has left
        seen.clear()
        assert kill_after_new_checkpoint(root, "rloo", moment, lambda: seen.extend(who_is_left())), "it was done before"
        assert seen, "nobody played where it was looked for"
        deadline = time.monotonic() + SECONDS
        while left := who_is_left():
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
    assert 0 < max(int(name.removeprefix("step-")) for name in checkpoints(root, "rloo")) < ITERATIONS
    return completed(root, "rloo")


@pytest.mark.slow
def test_a_killed_driver_resumes_to_the_same_weights_and_takes_its_ray_along(
    project: Path, undisturbed: Outcome
) -> None:
    def workers_and_ray() -> list[str]:
        # Two agents of Ray's stay for up to a minute: they wait for the head, to tell it that the node is gone.
        return [line for line in inhabitants(project) if "Agent" not in line]

    resumed = kill_and_complete(project, workers_and_ray)
    assert resumed == undisturbed
    assert len(json.loads(resumed[1])["iterations"]) == ITERATIONS


@pytest.mark.slow
def test_a_killed_driver_of_a_cluster_resumes_to_the_same_weights_and_its_workers_there_are_gone(
    project: Path, undisturbed: Outcome, add_node: AddNode
) -> None:
    for _ in range(2):
        add_node(1)
    assert kill_and_complete(project, worker_pids) == undisturbed
