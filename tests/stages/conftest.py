"""Projects for stages that are called as functions, and a registry for those that read or write one."""

from __future__ import annotations

from pathlib import Path

import pytest

from nightshift.project import paths
from tests.conftest import add_store


@pytest.fixture
def project(project_without_code: Path) -> Path:
    return project_without_code


@pytest.fixture
def registry(project: Path, migrated_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with an empty MLflow store."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{project}/{paths.MLFLOW_DATABASE}")
    add_store(project, migrated_store)
    return project
