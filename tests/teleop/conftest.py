"""Projects for stages that are called as functions, and for teleoperation: none asks DVC."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def project(project_without_code: Path) -> Path:
    return project_without_code
