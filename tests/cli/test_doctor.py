"""`nightshift doctor` names all that a run needs, found or missing, and what to do about what is missing."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest

from nightshift.cli import doctor
from nightshift.envs.base import Finding
from nightshift.errors import ProjectError
from nightshift.project import paths
from tests.conftest import REPOSITORY, add_store, install


@pytest.fixture
def root(project: Path, migrated_store: Path) -> Path:
    add_store(project, migrated_store)
    shutil.copy(REPOSITORY / paths.CONSTRAINTS, project)
    return project


def findings(root: Path) -> dict[str, Finding]:
    return {finding.about: finding for finding in doctor._findings(root)}


def test_a_sound_project_can_run_and_everything_is_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    doctor.examine()
    told = capsys.readouterr().out
    assert told.endswith("a run can start\n")
    for about in ("folder", "disk", "GPU", "dvc", "mlflow", "prefect", "ray", "torch", "port 4200", "port 5000"):
        assert about in told


def test_a_port_in_use_and_a_version_that_was_not_tested_are_noted_and_stop_no_run(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(install(tmp_path / "other", prefect="0.0.1"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setitem(doctor._PORTS, "ui", port)
        found = findings(root)
    assert (found[f"port {port}"].verdict, found[f"port {port}"].found) == ("note", f"port {port} is in use")
    assert found[f"port {port}"].remedy == f"nightshift ui --port {port + 1}"
    assert found["prefect"].verdict == "note"
    assert found["prefect"].found.startswith("0.0.1; tested with ")


def test_two_packages_of_the_same_version_are_both_named(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / paths.CONSTRAINTS).unlink()
    monkeypatch.syspath_prepend(install(tmp_path / "other", prefect="7.7.7", ray="7.7.7"))
    doctor.examine()
    assert capsys.readouterr().out.count("7.7.7") == 2


@pytest.mark.usefixtures("root")
def test_servers_that_do_not_answer_are_missing_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:s3cret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    with pytest.raises(ProjectError, match="a run would fail here: Prefect, MLflow"):
        doctor.examine()
    told = capsys.readouterr().out
    assert "no Prefect server answers" in told and "MLFLOW_TRACKING_URI" in told
    assert "s3cret" not in told
