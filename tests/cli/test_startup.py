"""What a command imports before it works: packages that take a second each are left to the commands that need them."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, edit

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


def test_plan_of_a_new_project_imports_dvc_and_numpy_alone_of_the_heavy_packages(project: Path) -> None:
    """Stages are stale, so all of the precheck is done. torch takes longer to import than the rest of `plan`."""
    assert HEAVY & modules_after("from nightshift.cli.commands import plan; plan()", project) == {"dvc", "numpy"}


def test_plan_finds_wrong_inputs_of_a_policy_without_torch(project: Path) -> None:
    edit(project, "policy", inputs=["objects", "touch"])
    program = """
import sys
from nightshift.cli.commands import plan
from nightshift.errors import ConfigError
try:
    plan()
except ConfigError as error:
    print(error.what.split(",")[0])
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=project, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["policy.inputs has touch", "False"]
