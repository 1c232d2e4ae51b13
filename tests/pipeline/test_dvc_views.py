"""DVC by itself: metrics and plots of evaluations between revisions, and commands that `dvc repro` finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from nightshift import files
from nightshift.adapters.dvc_store import DvcStore
from nightshift.config import merged
from nightshift.project import graph, packages, paths
from nightshift.reports import tables
from nightshift.reports.candidates import Candidate
from nightshift.reports.history import History
from nightshift.statistics.intervals import Rate
from nightshift.statistics.paired import Paired
from tests.command import dvc
from tests.conftest import add_store, git


def leave_evaluation(successes: int) -> None:
    """The files of an evaluation in which the trained policy solved so many of 20 states."""
    pair = Paired(states=20, won=successes - 10, lost=0).to_json()
    rates = {"sft": Rate(10, 20).to_json(), "rloo": Rate(successes, 20).to_json()}
    report = {
        "candidates": [
            {"name": name, "overall": rate, "gain": pair if name == "rloo" else None, "tasks": {"lift": rate}}
            for name, rate in rates.items()
        ]
    }
    iterations = [{"rollout/success": 0.5, "update/kl": 0.01}, {"rollout/success": successes / 20}]
    history = History(algorithm="rloo", iterations=iterations, validation={0: Rate(10, 20)}, kept=2)
    candidates = [Candidate(name="rloo", label="RLOO", folder=Path(), policy={}, history=history)]
    with files.new_folder(paths.EVALUATION) as folder:
        files.write_json(folder / paths.EVALUATION_METRICS.name, tables.metrics(report))
        (folder / paths.EVALUATION_SUCCESS.name).write_text(tables.success(report))
        (folder / paths.EVALUATION_LEARNING.name).write_text(tables.learning(candidates))


def shown(*arguments: str) -> Any:
    return json.loads(dvc(Path.cwd(), *arguments))


@pytest.fixture
def two_revisions(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two commits with an evaluation each, as `evaluate` leaves it in DVC's cache."""
    for place in ("data/init_states", "data/champion/opponent", "models/sft", "models/rloo", "models/rlpd"):
        (project / place).mkdir(parents=True)
        (project / place / "manifest.json").write_text("{}")
    (project / "versions.yaml").write_text("".join(f"{name}: '1'\n" for name in graph.packages(graph.load(project))))
    for successes in (14, 19):
        leave_evaluation(successes)
        store = DvcStore(project)
        store.record("evaluate")
        store.close()
        git(project, "add", "-A")
        git(project, "commit", "-q", "-m", f"{successes} solved")


@pytest.mark.usefixtures("two_revisions")
def test_metrics_are_shown_and_compared_between_revisions() -> None:
    metrics = shown("metrics", "show", "--json")[""]["data"]["reports/evaluation/metrics.json"]["data"]
    assert metrics["rloo"]["success"] == 0.95
    assert metrics["rloo"]["task"] == {"lift": 0.95}
    (changed,) = shown("metrics", "diff", "HEAD~1", "--json").values()
    assert changed["rloo.success"] == {"old": 0.7, "new": 0.95, "diff": 0.25}
    assert changed["rloo.gain"] == {"old": 0.2, "new": 0.45, "diff": 0.25}
    assert not [name for name in changed if name.startswith("sft")], "the clone did not change"


@pytest.mark.usefixtures("two_revisions")
def test_plots_are_drawn_and_compared_between_revisions() -> None:
    for arguments in (["show"], ["diff", "HEAD~1", "HEAD"]):
        found = shown("plots", *arguments, "--json")
        assert not found.get("errors"), found
        assert set(found["data"]) == {"success", "learning", "kl"}
    revisions = {revision for plot in found["data"]["learning"] for revision in plot["revisions"]}
    assert len(revisions) == 2


@pytest.mark.usefixtures("two_revisions")
def test_plots_are_one_page_of_html(project: Path) -> None:
    dvc(project, "plots", "diff", "HEAD~1", "HEAD", "-o", "plots")
    assert "Success on held-out init states" in (project / "plots" / "index.html").read_text()


@pytest.mark.slow
def test_a_command_takes_the_environment_in_the_folder_or_else_the_one_on_the_path(
    project: Path, migrated_store: Path
) -> None:
    add_store(project, migrated_store)
    packages.record(project, graph.load(project))  # as `make setup` does
    system = "/usr/bin:/bin"
    for algorithms, path in ((["rlpd"], system), ([], f"{sys.prefix}/bin:{system}")):
        params = yaml.safe_load((project / paths.PARAMS).read_text())
        params = merged(params, {"algorithms": algorithms, "policy": {"head": "tanh_gaussian"}})
        (project / paths.PARAMS).write_text(yaml.safe_dump(params))
        command = [f"{sys.prefix}/bin/dvc", "repro", "choose"]
        done = subprocess.run(
            command, env={**os.environ, "PATH": path}, cwd=project, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads((project / paths.choice("rlpd")).read_text()) == {"chosen": bool(algorithms)}
        (project / ".venv").unlink(missing_ok=True)
