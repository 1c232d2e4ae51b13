"""One parent per set of params, one child per stage, no step twice: on a real SQLite store."""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
import signal
import socket
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from nightshift import config
from nightshift.adapters import mlflow_tracking, model_versions
from nightshift.adapters.mlflow_tracking import CACHED, CHANGED, FINGERPRINT, FOLDER, PARENT, Tracking
from nightshift.adapters.tracking import RunKind
from nightshift.errors import ProjectError, Unreachable
from nightshift.project import paths
from tests.conftest import edit, make_project
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One project for the module: making and migrating a store takes seconds."""
    return make_project(tmp_path_factory.mktemp("tracking") / "project")


@pytest.fixture(autouse=True)
def _store(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root}/.state/mlflow/mlflow.db")
    monkeypatch.chdir(root)
    yield


def tracking(root: Path, code: str = "code") -> Tracking:
    return Tracking(root, config.load(root / "params.yaml"), "abc", code)


def joined(root: Path, stage: str, fingerprint: str, code: str = "code") -> str:
    """The parent that a process joins which runs one stage, as `dvc repro` starts them."""
    track = tracking(root, code)
    with track.stage(stage, fingerprint, {}):
        pass
    track.close("FINISHED")
    return track.parent_id


def test_processes_with_the_same_params_and_code_join_one_parent_run(root: Path) -> None:
    first = joined(root, "states", "s1")
    edit(root, "machine", workers=7)
    assert joined(root, "collect", "c1") == first, "how many workers there are does not count"
    assert joined(root, "dataset", "d1", code="other code") != first
    edit(root, "sft", steps=301)
    assert joined(root, "dataset", "d1") != first


def test_a_folder_may_have_an_apostrophe(root: Path) -> None:
    other = root / "o'brien"
    other.mkdir()
    shutil.copy(root / "params.yaml", other)
    assert joined(other, "states", "s1") == joined(other, "collect", "c1")


def test_the_experiment_opens_in_the_view_for_models(root: Path) -> None:
    track = tracking(root)
    experiment = track.client.get_experiment(track.experiment_id)
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development", "as MLflow's pages name it"


def test_a_parent_has_each_stage_once_so_another_run_is_another_parent(root: Path) -> None:
    first = joined(root, "states", "s2", code="once")
    again = joined(root, "states", "s3", code="once")
    assert again != first
    assert joined(root, "collect", "c3", code="once") == again, "the newest"


def test_a_parent_says_which_params_differ_from_the_run_before_and_keeps_the_file(root: Path) -> None:
    edit(root, "sft", steps=302)
    joined(root, "states", "s4", code="changes")
    edit(root, "sft", steps=303)
    edit(root, "machine", workers=3)
    run = tracking(root).client.get_run(joined(root, "states", "s5", code="changes"))
    assert run.data.tags[CHANGED] == "sft.steps 302 → 303"
    assert run.data.params["sft.steps"] == "303"
    assert re.fullmatch(r"fake rloo \d{4}-\d\d-\d\d \d\d:\d\d", run.info.run_name)
    assert {file.path for file in tracking(root).client.list_artifacts(run.info.run_id)} == {"params.yaml"}


def test_trials_and_classifiers_are_no_runs_of_the_pipeline_unless_they_join_one(root: Path) -> None:
    params = config.load(root / "params.yaml")
    parents: dict[str, str] = {}
    kinds: list[RunKind] = ["trial", "classifier", "pipeline"]
    for kind in kinds:
        track = Tracking(root, params, "abc", "kinds", kind)
        with track.stage("sft", kind, {}):
            parents[kind] = track.parent_id
    nights = [run.run_id for run in model_versions.runs(root, model_versions.EVERY)]
    assert [kind for kind in kinds if parents[kind] in nights] == ["pipeline"]
    assert model_versions.find_run(root, parents["trial"]).run_id == parents["trial"], "a trial can be reproduced"
    track = Tracking(root, params, "abc", "kinds", "classifier")
    with track.stage("classifier", "joins", {}):
        assert track.parent_id == parents["pipeline"]


@pytest.mark.parametrize("status", ["FINISHED", "FAILED", "KILLED"])
def test_a_classifier_that_joins_a_run_of_the_pipeline_leaves_its_end_as_it_was(root: Path, status: str) -> None:
    night = tracking(root, code=f"night {status}")
    with night.stage("sft", f"night {status}", {}):
        pass
    night.close(status)
    before = night.client.get_run(night.parent_id)
    track = Tracking(root, config.load(root / "params.yaml"), "abc", f"night {status}", "classifier")
    with pytest.raises(KeyboardInterrupt), track.stage("classifier", f"night {status}", {}):
        raise KeyboardInterrupt
    track.close("KILLED")
    assert track.parent_id == night.parent_id
    after = night.client.get_run(night.parent_id).info
    assert (after.status, after.end_time) == (before.info.status, before.info.end_time)


def test_results_are_metrics_of_the_parent_and_cached_stages_are_linked(root: Path) -> None:
    track = tracking(root, "results")
    with track.stage("sft", "known", {}) as made:
        pass
    later = tracking(root, "results again")
    with later.stage("evaluate", "e1", {}) as evaluated:
        pass
    assert later.link_cached({"sft": "known", "rloo": "never ran"}) == {"sft": made.run_id}
    later.publish({"success": 0.75}, {"gate.reason": "better"}, "words")
    run = later.client.get_run(later.parent_id)
    assert run.data.metrics == {"success": 0.75}
    assert run.data.tags["gate.reason"] == "better"
    assert run.data.tags["mlflow.note.content"] == "words"
    assert run.data.tags[f"{CACHED}.sft"] == made.run_id
    assert later.ran == {"evaluate": evaluated.run_id}


def test_ctrl_c_while_results_are_published_waits_until_all_are(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    track = tracking(root, code="interrupted")
    written: list[str] = []

    def interrupted(self: MlflowClient, run_id: str, name: str, value: str) -> None:
        signal.raise_signal(signal.SIGINT)
        written.append(name)

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "set_tag", interrupted)
        with pytest.raises(KeyboardInterrupt):
            track.publish({}, {"one": "1", "two": "2"}, "note")
    assert written[:2] == ["one", "two"]
    track.close("KILLED")


def test_a_killed_stage_is_resumed_and_no_step_is_recorded_twice(root: Path) -> None:
    track = tracking(root)
    with pytest.raises(KeyboardInterrupt), track.stage("sft", "f1", {"sft": {"steps": 3}}) as tracker:
        tracker.log({"loss": 1.0}, 1)
        tracker.log({"loss": 0.5}, 2)
        raise KeyboardInterrupt
    killed = tracker.run_id
    assert track.client.get_run(killed).info.status == "KILLED"
    with tracking(root).stage("sft", "f1", {"sft": {"steps": 3}}) as tracker:
        tracker.log({"loss": 0.5}, 2)
        tracker.log({"loss": 0.2}, 3)
    assert tracker.run_id == killed
    assert [m.step for m in track.client.get_metric_history(killed, "loss")] == [1, 2, 3]
    run = track.client.get_run(killed)
    assert run.info.status == "FINISHED"
    assert run.data.params["sft.steps"] == "3"


def test_a_finished_stage_with_the_same_fingerprint_gets_a_new_run(root: Path) -> None:
    track = tracking(root)
    ids = []
    for _ in range(2):
        with track.stage("sft", "f2", {}) as tracker:
            ids.append(tracker.run_id)
    assert ids[0] != ids[1]
    assert track.client.get_run(ids[1]).data.tags[PARENT] == track.parent_id


def test_runs_that_sigkill_left_running_are_killed_when_the_next_run_begins(root: Path) -> None:
    track = tracking(root)
    left = track._open_child("rloo", "old number").info.run_id
    again = tracking(root)
    assert track.client.get_run(left).info.status == "KILLED"
    assert track.client.get_run(left).data.tags[FINGERPRINT] == "old number"
    with again.stage("rloo", "old number", {}) as tracker:
        assert tracker.run_id == left, "it is resumed"


def test_a_stage_that_another_folder_runs_at_the_same_time_keeps_its_run(root: Path, tmp_path: Path) -> None:
    """Trials of a sweep, and clones on one MLflow server, begin with the same stages."""
    clone = make_project(tmp_path / "clone")
    theirs = tracking(clone)
    alive = theirs._begin("collect", "same", {}).info.run_id
    ours = tracking(root, code="at the same time")
    mine = ours._begin("collect", "same", {}).info.run_id
    run = ours.client.get_run(alive)
    assert (run.info.status, run.data.tags[PARENT]) == ("RUNNING", theirs.parent_id)
    theirs.client.set_terminated(alive, "KILLED")
    with tracking(root, code="at the same time").stage("collect", "same", {}) as tracker:
        assert tracker.run_id == mine, "its own killed one is resumed"
    with tracking(clone).stage("collect", "same", {}) as tracker:
        assert tracker.run_id == alive, "where its checkpoints are"


def test_dataset_lineage_and_artifacts_are_found_by_name(root: Path, tmp_path: Path) -> None:
    track = tracking(root)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/plot.png").write_bytes(b"png")
    with track.stage("evaluate", "f3", {}) as tracker:
        tracker.dataset("demos", "d41d8cd98f00b204e9800998ecf8427e.dir", Path("data/dataset"))
        tracker.artifact(tmp_path / "folder")
    found = track.client.search_runs([track.experiment_id], "dataset.name = 'demos'")
    assert [run.info.run_id for run in found] == [tracker.run_id]
    assert [f.path for f in track.client.list_artifacts(tracker.run_id, "folder")] == ["folder/plot.png"]
    assert (root / ".state/mlflow/artifacts").is_dir(), "artifacts stay in the project"


def test_a_copy_of_a_project_reads_and_writes_its_own_artifacts(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "note.txt").write_text("made in the original")
    with tracking(root).stage("sft", "before the copy", {}) as tracker:
        tracker.artifact(tmp_path / "note.txt")
    copy = tmp_path / "copy"
    shutil.copytree(root, copy, symlinks=True)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{copy}/.state/mlflow/mlflow.db")
    monkeypatch.chdir(copy)
    moved = tracking(copy)
    assert moved.client.get_run(tracker.run_id).info.artifact_uri.startswith(f"file://{copy}/")
    assert Path(moved.client.download_artifacts(tracker.run_id, "note.txt")).read_text() == "made in the original"
    before = set(root.rglob("*"))
    with moved.stage("sft", "after the copy", {}) as tracker:
        tracker.artifact(tmp_path / "note.txt")
    assert set(root.rglob("*")) == before
    assert (copy / ".state" / "mlflow" / "mlflow.db").stat().st_mode & 0o077 == 0


def test_a_run_that_was_killed_before_its_folder_moved_is_shown_as_dead_and_the_next_is_compared_with_it(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tracking(root, code="moving")
    dead = first.parent_id
    first.client.update_run(dead, status="RUNNING")  # as a kill leaves it
    neighbour = f"{first.client.get_run(dead).data.tags[FOLDER]}-of-another"
    other = first.client.create_run(first.experiment_id, tags={FOLDER: neighbour}).info.run_id
    moved = tmp_path / "moved 100%"
    shutil.copytree(root, moved, symlinks=True)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{moved}/.state/mlflow/mlflow.db")
    monkeypatch.chdir(moved)
    edit(moved, "sft", steps=77)
    there = tracking(moved, code="moving")
    assert there.client.get_run(dead).info.status == "KILLED"
    assert there.client.get_run(other).info.status == "RUNNING", "of a folder whose name begins as this one's"
    assert "sft.steps" in there.client.get_run(there.parent_id).data.tags[CHANGED]


def test_what_the_machine_does_is_recorded_while_a_stage_runs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.01")
    track = tracking(root, code="machine")
    with track.stage("sft", "m1", {}) as tracker:
        wait_until(lambda: "system/cpu_utilization_percentage" in track.client.get_run(tracker.run_id).data.metrics)
    recorded = track.client.get_run(tracker.run_id).data.metrics
    assert {"system/system_memory_usage_percentage", "system/disk_usage_percentage"} <= recorded.keys()
    assert not [thread.name for thread in threading.enumerate() if thread.name == "SystemMetricsMonitor"]


def test_a_server_that_takes_connections_and_says_nothing_is_given_up_after_the_first(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow's own client asks four times, for half a minute each."""
    monkeypatch.setattr(mlflow_tracking, "_SECONDS_TO_ANSWER", 0.1)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(Unreachable, match="does not answer"):
            mlflow_tracking.connect(root)
        assert len(connections(silent)) == 1


def connections(server: socket.socket) -> list[socket.socket]:
    """Those that wait to be taken."""
    server.setblocking(False)
    found = []
    with contextlib.suppress(BlockingIOError):
        while True:
            taken, _ = server.accept()
            taken.close()
            found.append(taken)
    return found


@pytest.mark.slow  # SQLite waits five seconds for a lock, each time
def test_a_store_that_another_process_keeps_locked_is_one_sentence_at_every_step(
    root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    track = tracking(root, code="locked")
    database = root / paths.MLFLOW_DATABASE
    with contextlib.closing(sqlite3.connect(database)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(Unreachable, match=r"another process keeps MLflow's store .* locked"):
            tracking(root)
        with pytest.raises(Unreachable, match="locked"), track.stage("sft", "f1", {}):
            pytest.fail("the stage began")
    with pytest.raises(Unreachable, match="locked"), track.stage("sft", "f1", {}) as tracker:
        other = sqlite3.connect(database)
        other.execute("BEGIN EXCLUSIVE")
        tracker.log({"loss": 1.0}, 1)
    other.close()
    with track.stage("sft", "f1", {}) as tracker:
        tracker.log({"loss": 1.0}, 1)
    assert "Traceback" not in capfd.readouterr().err


def test_a_stage_that_fills_another_disk_than_that_of_the_store_names_its_own_file(root: Path) -> None:
    track = tracking(root, code="another disk")
    with (
        pytest.raises(ProjectError, match=r"no space left on the disk that holds /tmp/film\.mp4\n"),
        track.stage("evaluate", "another disk", {}),
    ):
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/film.mp4")


def test_a_disk_that_is_full_when_a_run_ends_is_left_to_the_next_run(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    track = tracking(root, code="full")
    (root / paths.DVC_LOCK).write_text("stages: {}\n")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with track.stage("sft", "full", {}):
        pass
    with monkeypatch.context() as patch:
        patch.setattr(track.client, "log_artifact", full)
        patch.setattr(track.client, "set_terminated", full)
        track.close("FINISHED")
    assert track.client.get_run(track.parent_id).info.status == "RUNNING"
    tracking(root)
    assert track.client.get_run(track.parent_id).info.status == "KILLED"
