"""What a command imports before it works: packages that take a second each are left to the commands that need them."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

HEAVY = {"torch", "scipy", "numpy", "mlflow", "prefect", "ray", "dvc", "networkx", "matplotlib", "pynvml"}


def test_the_version_is_that_of_the_package() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nightshift", "--version"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"nightshift {version('nightshift')}\n"


def modules_after(program: str, root: Path) -> set[str]:
    """What a new interpreter has imported when the program is done."""
    done = subprocess.run(
        [sys.executable, "-c", f"{program}; import sys; print(*sys.modules)"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return set(done.stdout.splitlines()[-1].split())  # after what the program printed


@pytest.mark.parametrize(
    ("module", "also_without"), [("nightshift.cli.app", {"pydantic", "yaml"}), ("nightshift.cli.commands", set())]
)
def test_help_plan_and_a_run_with_nothing_to_do_import_no_heavy_package_first(
    module: str, also_without: set[str]
) -> None:
    assert not (HEAVY | also_without) & modules_after(f"import {module}", REPOSITORY)


def test_plan_of_a_new_project_imports_dvc_alone_of_the_heavy_packages(project: Path) -> None:
    """networkx, for one, takes longer than all that `plan` computes."""
    program = "from pathlib import Path; from nightshift.pipeline.run import statuses; statuses(Path.cwd())"
    assert HEAVY & modules_after(program, project) == {"dvc"}
