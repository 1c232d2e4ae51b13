"""The driver of reinforcement learning on Ray is killed while its workers play: nothing is lost, nobody is left."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nightshift import files, paths, policies
from nightshift.policies.gaussian_mlp import GaussianMlp
from tests.conftest import edit, make_project, nightshift
from tests.distributed.test_pool import worker_pids
from tests.faults.conftest import AddNode
from tests.faults.test_interrupt import inhabitants, is_empty
from tests.faults.test_kill_and_resume import checkpoints, kill_after_new_checkpoint

ITERATIONS = 12
MOMENTS = (0.0, 0.07)
"""Seconds after a checkpoint: at once, and when the next iteration is being played."""
SECONDS = 20

Outcome = tuple[bytes, bytes]


def outcome(root: Path) -> Outcome:
    """Weights and history after the stage has run to its end."""
    done = nightshift(root, "stage", "rloo")
    assert done.returncode == 0, done.stderr
    return (root / paths.RLOO_POLICY / "policy.safetensors").read_bytes(), (root / paths.RLOO_HISTORY).read_bytes()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_project(tmp_path_factory.mktemp("driver") / "project")
    edit(root, "rloo", iterations=ITERATIONS, groups=16)
    with files.new_folder(root / paths.SFT_POLICY) as folder:
        policies.save(GaussianMlp(inputs={"objects": 3, "task": 2}, hidden=[8], chunk=1), folder)
    return root


@pytest.fixture(scope="module")
def undisturbed(project: Path) -> Outcome:
    """In one process that nobody touches."""
    edit(project, "machine", workers=0)
    return outcome(project)


def start_over(root: Path) -> None:
    edit(root, "machine", workers=2)
    for path in (root / ".state" / "rloo").iterdir():
        for step in path.glob("step-*"):
            step.rename(path / f"used-{time.monotonic_ns()}")


def kill_and_complete(root: Path, is_abandoned: Callable[[], bool]) -> Outcome:
    start_over(root)
    for moment in MOMENTS:
        assert kill_after_new_checkpoint(root, "rloo", moment), "it was done before it was killed"
        assert is_abandoned(), [worker_pids(), inhabitants(root)]
    assert 0 < max(int(name.removeprefix("step-")) for name in checkpoints(root, "rloo")) < ITERATIONS
    return outcome(root)


def test_a_killed_driver_resumes_to_the_same_weights_and_takes_its_ray_along(
    project: Path, undisturbed: Outcome
) -> None:
    resumed = kill_and_complete(project, lambda: is_empty(project))
    assert resumed == undisturbed
    assert len(json.loads(resumed[1])) == ITERATIONS


def test_a_killed_driver_of_a_cluster_resumes_to_the_same_weights_and_its_workers_there_are_gone(
    project: Path, undisturbed: Outcome, add_node: AddNode
) -> None:
    for _ in range(2):
        add_node(1)

    def are_gone() -> bool:
        deadline = time.monotonic() + SECONDS
        while worker_pids() and time.monotonic() < deadline:
            time.sleep(0.1)
        return not worker_pids()

    assert kill_and_complete(project, are_gone) == undisturbed
