"""Which packages are installed, and the versions of those that compute results.

A compute node has what a stage needs, and not what runs and records a pipeline; pyproject.toml lists both.

Another release of torch or mujoco gives other numbers, so DVC's cache key includes them. DVC reads params from files
only; hence versions.yaml, which git ignores and every command that looks at the cache brings up to date.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import yaml

from nightshift import files
from nightshift.errors import ProjectError
from nightshift.project import graph, paths
from nightshift.project.graph import Definition

_HEADER = "# Written by nightshift: installed versions that results depend on. dvc.yaml says which stage uses which.\n"

PIPELINE = ("dvc", "mlflow", "prefect", "ray")
"""What pyproject.toml installs with the extra `pipeline`."""
_RECORDERS = ("dvc", "mlflow")
AS_COMPUTE_NODE = "NIGHTSHIFT_COMPUTE_NODE"
"""Environment variable: if it is 1, this machine counts as a compute node whatever is installed."""


def on_compute_node() -> bool:
    """Whether DVC or MLflow is missing: then a stage leaves a receipt and its metrics in files, to be adopted later."""
    return os.environ.get(AS_COMPUTE_NODE) == "1" or not all(map(_importable, _RECORDERS))


def require(package: str, why: str, otherwise: str) -> None:
    """ProjectError if the package is missing; `why` it is needed, and what to do `otherwise` than install it."""
    if not _importable(package):
        raise ProjectError(f"{why}, and {package} is not installed here", f"{otherwise}, or {_install(package)}")


def missing(error: ModuleNotFoundError) -> ProjectError | None:
    """The sentence for a package that is not installed; None if the module is our own."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "nightshift", "flows", "tasks"):
        return None
    return ProjectError(f"this needs the package {package}, which is not installed here", _install(package))


def _install(package: str) -> str:
    return "pip install -e '.[pipeline]' (docs/compute_node.md)" if package in PIPELINE else f"pip install {package}"


def _importable(package: str) -> bool:
    found = find_spec(package)
    return found is not None and found.origin is not None  # a folder without code, as mlflow/ here, has no origin


def installed(definitions: dict[str, Definition]) -> Mapping[str, str]:
    """The installed release of every package that a stage names."""
    return {package: release(package) for package in sorted(graph.packages(definitions))}


def release(package: str) -> str:
    """Without the local part, which names a build: 2.13.0+cpu and 2.13.0+cu130 are both 2.13.0; "none" if missing."""
    try:
        return version(package).split("+")[0]
    except PackageNotFoundError:
        return "none"


def record(root: Path, definitions: dict[str, Definition]) -> Mapping[str, str]:
    """Write the installed versions to versions.yaml if it says otherwise; returns them."""
    found = installed(definitions)
    content = (_HEADER + yaml.safe_dump(dict(found))).encode()
    path = root / paths.VERSIONS
    if not path.exists() or path.read_bytes() != content:
        files.write_bytes(path, content)
    return found
