"""Metrics in a plain file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nightshift.adapters.tracking import JsonlTracker, artifacts, replay
from nightshift.errors import DataError


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_two_policies_logged_at_one_step_are_both_recorded(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log({"success/sft": 0.5}, 0)
    tracker.log({"success/rloo": 0.9}, 0)
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 0, "success/sft": 0.5}, {"step": 0, "success/rloo": 0.9}]


def test_a_resumed_run_appends_and_records_no_step_of_a_metric_twice(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonlTracker(path)
    first.log({"loss": 1.0, "rate": 0.1}, 1)
    first.log({"loss": 0.5}, 2)
    with path.open("a") as stream:
        stream.write('{"step": 3, "lo')  # killed while it wrote
    resumed = JsonlTracker(path)
    resumed.log({"loss": 1.0, "rate": 0.1}, 1)
    resumed.log({"loss": 0.5, "rate": 0.2}, 2)
    resumed.log({"loss": 0.2}, 3)
    assert lines(path) == [
        {"step": 1, "loss": 1.0, "rate": 0.1},
        {"step": 2, "loss": 0.5},
        {"step": 2, "rate": 0.2},
        {"step": 3, "loss": 0.2},
    ]


def test_a_record_is_replayed_to_another_tracker_with_artifacts_and_datasets(tmp_path: Path) -> None:
    path = tmp_path / "node" / "metrics.jsonl"
    for _ in range(2):  # the second as a resumed run
        first = JsonlTracker(path)
        first.dataset("demos", "unrecorded", Path("data/dataset"))
        first.log({"loss": 1.0}, 1)
        first.artifact(Path("reports/evaluation"))
    replay(path, JsonlTracker(tmp_path / "home.jsonl"), tmp_path / "node", {"data/dataset": "abc.dir"})
    assert lines(tmp_path / "home.jsonl") == [
        {"dataset": {"name": "demos", "digest": "abc.dir", "path": "data/dataset"}},
        {"step": 1, "loss": 1.0},
        {"artifact": (tmp_path / "node/reports/evaluation").as_posix()},
    ]
    assert artifacts(path, tmp_path / "node") == [Path("reports/evaluation")]


@pytest.mark.parametrize("named", ["/etc/hostname", "../secret", "reports/../../secret", "link/secret"])
def test_an_artifact_outside_the_folder_is_neither_listed_nor_replayed(tmp_path: Path, named: str) -> None:
    node = tmp_path / "node"
    (node / "reports").mkdir(parents=True)
    (node / "link").symlink_to(tmp_path)
    (tmp_path / "secret").touch()
    JsonlTracker(node / "metrics.jsonl").artifact(Path(named))
    with pytest.raises(DataError, match=f"names the artifact {named}, which is outside"):
        artifacts(node / "metrics.jsonl", node)
    with pytest.raises(DataError, match=f"names the artifact {named}, which is outside"):
        replay(node / "metrics.jsonl", JsonlTracker(tmp_path / "home.jsonl"), node, {})
    assert not (tmp_path / "home.jsonl").exists()


def test_a_record_in_a_folder_that_cannot_be_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    JsonlTracker(tmp_path / "metrics.jsonl").artifact(Path("reports"))
    monkeypatch.setattr("nightshift.files.write_bytes", None)
    assert artifacts(tmp_path / "metrics.jsonl", tmp_path) == [Path("reports")]
