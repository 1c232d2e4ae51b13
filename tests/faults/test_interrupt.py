"""Ctrl-C, SIGTERM and SIGKILL: everything ends within seconds and the next run resumes."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from nightshift import files, policies
from nightshift.pipeline.run import Session, run_stage
from nightshift.policies.gaussian_mlp import GaussianMlp
from nightshift.project import paths
from tests.command import Command
from tests.conftest import add_store, edit, git, make_project, nightshift
from tests.waiting import SECONDS

ITERATIONS = 20


def inhabitants(root: Path) -> list[str]:
    """Command lines of all processes that work in a project, of whatever group or session they are."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink().is_relative_to(root):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # it ended meanwhile, or is another user's
            continue
    return found


def is_empty(root: Path) -> bool:
    deadline = time.monotonic() + SECONDS
    while inhabitants(root) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not inhabitants(root)


def project(root: Path, *, workers: int) -> Path:
    make_project(root)
    edit(root, "machine", workers=workers)
    edit(root, "rloo", iterations=ITERATIONS)
    git(root, "commit", "-qam", "longer")
    return root


def interrupt(root: Path, *arguments: str, number: signal.Signals) -> list[str]:
    """Start a command and end it while it trains; returns who worked in the project then."""
    command = Command(root, *arguments)
    try:
        deadline = time.monotonic() + SECONDS
        while not list(root.glob(".state/rloo/*/step-*")):
            assert command.is_running() and time.monotonic() < deadline
            time.sleep(0.05)
        busy = inhabitants(root)
        # A terminal sends Ctrl-C to the whole group; a service manager sends SIGTERM to the process.
        (os.kill if number == signal.SIGTERM else os.killpg)(command.pid, number)
        ended = command.wait(SECONDS)
    finally:
        command.kill()
    if number != signal.SIGKILL:
        assert ended.returncode == 130
        assert "stopped; run again to resume" in ended.stderr
    return busy


def steps_trained(root: Path) -> list[int]:
    """The iterations of all runs so far, as they were logged."""
    (metrics,) = root.glob(".state/metrics/rloo-*.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [line["step"] for line in lines if "step" in line]


def test_ctrl_c_ends_training_and_every_process_of_ray_and_the_next_run_resumes(
    tmp_path: Path, migrated_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = project(tmp_path / "project", workers=1)
    add_store(root, migrated_store)
    with files.new_folder(root / paths.SFT_POLICY) as folder:
        policies.save(GaussianMlp(inputs={"objects": 3, "task": 2}, hidden=[8], chunk=1, action_dim=7), folder)
    busy = interrupt(root, "stage", "choose", "rloo", number=signal.SIGINT)
    assert any("raylet" in line for line in busy)
    assert is_empty(root), inhabitants(root)
    done = len(steps_trained(root))
    edit(root, "machine", workers=0)  # no part of what is computed, and sooner there; so is this process
    monkeypatch.chdir(root)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root / paths.MLFLOW_DATABASE}")
    with Session(root) as session:
        run_stage("rloo", session)
    assert len(json.loads((root / paths.RLOO_HISTORY).read_text())["iterations"]) == ITERATIONS
    assert steps_trained(root)[done] > 1, "it started over"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_pipeline_ended_in_training_leaves_no_process_and_is_completed_by_the_next_run(
    tmp_path: Path, number: signal.Signals
) -> None:
    root = project(tmp_path / "project", workers=2)
    busy = interrupt(root, "run", number=number)
    for name in ("raylet", "flows.server"):
        assert any(name in line for line in busy)
    assert is_empty(root), inhabitants(root)
    done = nightshift(root, "run")
    assert done.returncode == 0, done.stderr
    assert "sft  cached" in done.stdout
    assert (root / paths.RECEIPT).exists()
    assert "stale" not in nightshift(root, "plan").stdout
    assert not list(root.rglob("*.partial-*"))
    assert is_empty(root), inhabitants(root)
