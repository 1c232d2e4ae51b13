"""What a command imports before it works: packages that take a second each are left to the commands that need them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

HEAVY = {"torch", "scipy", "numpy", "mlflow", "prefect", "ray", "dvc", "networkx", "matplotlib", "pynvml"}


@pytest.mark.parametrize(
    ("module", "also_without"), [("nightshift.cli.app", {"pydantic", "yaml"}), ("nightshift.cli.commands", set())]
)
def test_help_plan_and_a_run_with_nothing_to_do_import_no_heavy_package_first(
    module: str, also_without: set[str]
) -> None:
    program = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=300
    )
    assert not (HEAVY | also_without) & set(done.stdout.split())


def test_plan_of_a_new_project_imports_dvc_alone_of_the_heavy_packages(project: Path) -> None:
    """networkx, for one, takes longer than all that `plan` computes."""
    program = (
        "import sys; from pathlib import Path; from nightshift.pipeline.run import statuses;"
        "statuses(Path.cwd()); print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=project, capture_output=True, text=True, check=True, timeout=300
    )
    assert HEAVY & set(done.stdout.split()) == {"dvc"}
