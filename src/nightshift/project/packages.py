"""Installed versions of the packages that compute results.

Another release of torch or mujoco gives other numbers, so DVC's cache key includes them. DVC reads params from files
only; hence versions.yaml, which git ignores and every command that looks at the cache brings up to date.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import yaml

from nightshift import files
from nightshift.project import graph, paths
from nightshift.project.graph import Definition

_HEADER = "# Written by nightshift: installed versions that results depend on. dvc.yaml says which stage uses which.\n"


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
