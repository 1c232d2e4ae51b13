"""What a session does about one that was killed in the same folder, on a real MLflow store."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nightshift import config, files
from nightshift.adapters.mlflow_tracking import Tracking
from nightshift.errors import Busy, Unreachable
from nightshift.pipeline.run import LOCK, Session, check_free, ensure, was_killed
from nightshift.project import paths
from tests.conftest import add_store


def test_runs_that_a_killed_session_left_open_are_ended_though_no_stage_has_to_run(
    project: Path, migrated_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_store(project, migrated_store)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{project / paths.MLFLOW_DATABASE}")
    dead = Tracking(project, config.load(project / paths.PARAMS), "1234", "code")
    assert dead.client.get_run(dead.parent_id).info.status == "RUNNING"
    (project / LOCK).write_text("123456\n")
    check_free(project)
    assert was_killed(project), "asking does not forget it"
    with Session(project):
        assert dead.client.get_run(dead.parent_id).info.status == "KILLED"
    assert not was_killed(project)


def test_what_was_killed_is_not_forgotten_while_mlflow_does_not_answer(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    (project / LOCK).parent.mkdir(exist_ok=True)
    (project / LOCK).write_text("123456\n")
    with pytest.raises(Unreachable), Session(project):
        pass
    assert was_killed(project)


def test_outputs_stay_where_mlflow_does_not_answer(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    output = project / paths.choice("rloo")
    output.parent.mkdir(parents=True)
    files.write_json(output, {"chosen": False})
    with Session(project) as session, pytest.raises(Unreachable):
        ensure("choose", session)
    assert output.exists()


def test_a_folder_that_a_session_works_in_is_not_free(project: Path) -> None:
    check_free(project)
    with Session(project), pytest.raises(Busy, match=f"another run \\(process {os.getpid()}\\) is working"):
        check_free(project)
