"""Which packages are installed, and the versions of those that compute results.

A compute node has what a stage needs, and not what runs and records a pipeline; pyproject.toml lists both.

Another release of torch or mujoco gives other numbers, so DVC's cache key includes them. DVC reads params from files
only; hence versions.yaml, which git ignores and every command that looks at the cache brings up to date. Beside
releases it has the packages that add what params.yaml names: a suite, a family of policies, a reward (`plugins.py`).
Those are under development more often than torch is, so their code counts as well.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from nightshift import config, files, plugins
from nightshift.errors import ProjectError
from nightshift.project import graph, paths
from nightshift.project.graph import Definition

_HEADER = "# Written by nightshift: installed versions that results depend on. dvc.yaml says which stage uses which.\n"

PIPELINE = ("dvc", "mlflow", "prefect", "ray")
"""What pyproject.toml installs with the extra `pipeline`."""
_RECORDERS = ("dvc", "mlflow")
PLUG_INS = {
    "plugin-suite": (plugins.SUITES, "env", "suite"),
    "plugin-policy": (plugins.POLICIES, "policy", "family"),
    "plugin-reward": (plugins.REWARDS, "rlpd", "reward"),
}
"""Keys of versions.yaml, each with the group of entry points and the parameter that names one of them."""
_OURS = {*config.FAMILIES, config.SIMULATOR}
"""Names for which no package has to be looked for."""
NONE = "none"
"""The version of what is not installed; the plug-in of what Nightshift has itself."""
_SHOWN = 12
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
AS_COMPUTE_NODE = "NIGHTSHIFT_COMPUTE_NODE"
"""Environment variable: if it is 1, this machine counts as a compute node whatever is installed."""


def on_compute_node() -> bool:
    """Whether DVC or MLflow is missing: then a stage leaves a receipt and its metrics in files, to be adopted later."""
    return os.environ.get(AS_COMPUTE_NODE) == "1" or not all(map(is_installed, _RECORDERS))


def require(package: str, why: str, otherwise: str) -> None:
    """ProjectError if the package is missing; `why` it is needed, and what to do `otherwise` than install it."""
    if not is_installed(package):
        raise ProjectError(f"{why}, and {package} is not installed here", f"{otherwise}, or {_install(package)}")


def missing(error: ModuleNotFoundError) -> ProjectError | None:
    """The sentence for a package that is not installed; None if the module is our own."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "nightshift", "flows", "tasks"):
        return None
    return ProjectError(f"this needs the package {package}, which is not installed here", _install(package))


def _install(package: str) -> str:
    return "pip install -e '.[pipeline]' (docs/compute_node.md)" if package in PIPELINE else f"pip install {package}"


def is_installed(package: str) -> bool:
    """Whether it can be imported."""
    found = find_spec(package)
    return found is not None and found.origin is not None  # a folder without code, as mlflow/ here, has no origin


def installed(root: Path, definitions: dict[str, Definition]) -> Mapping[str, str]:
    """The installed release of every package that a stage names, and what adds the suite, policy and reward there."""
    params = config.read_yaml(root / paths.PARAMS) if (root / paths.PARAMS).exists() else {}
    return {
        name: used_plug_in(name, params) if name in PLUG_INS else release(name)
        for name in sorted(graph.packages(definitions))
    }


def used_plug_in(key: str, params: Any) -> str:
    """The package behind one of PLUG_INS with these params, as read from YAML; "none" if it is Nightshift's own."""
    group, section, name = PLUG_INS[key]
    values = params.get(section) if isinstance(params, dict) else None
    wanted = str(values.get(name)) if isinstance(values, dict) else ""
    entry = None if wanted in _OURS else plugins.find(group).get(wanted)
    return plug_in(entry) if entry else NONE


def installed_plug_ins() -> dict[str, str]:
    """Every package that adds what episodes or learning may depend on."""
    groups = [group for group, _, _ in PLUG_INS.values()]
    return {plugins.package(entry): plug_in(entry) for group in groups for entry in plugins.find(group).values()}


def plug_in(entry: EntryPoint) -> str:
    """Package, version, digest of its code, and the releases of what it says that it needs.

    Example: "nightshift-reach 1.0 (code 5e0c1f8a9b21; gymnasium 1.1.0)"
    """
    return f"{plugins.release(entry)} ({'; '.join([f'code {_code(entry)[:_SHOWN]}', *_needed(entry)])})"


def _code(entry: EntryPoint) -> str:
    """Digest of the top-level package or module, also of one that is installed to be edited. It is not imported."""
    found = find_spec(entry.module.partition(".")[0])
    if found is None:
        return NONE
    folders = sorted(found.submodule_search_locations or ())
    places = folders or ([found.origin] if found.origin else [])
    return hashlib.sha256("".join(files.identity(Path(place)) for place in places).encode()).hexdigest()


def _needed(entry: EntryPoint) -> Iterator[str]:
    for requirement in sorted((entry.dist.requires if entry.dist else None) or ()):
        name = _REQUIREMENT.match(requirement)
        if name and name[0] != "nightshift" and "extra ==" not in requirement:
            yield f"{name[0]} {release(name[0])}"


def release(package: str) -> str:
    """Without the local part, which names a build: 2.13.0+cpu and 2.13.0+cu130 are both 2.13.0; "none" if missing."""
    try:
        return _version(package, plugins.places()).split("+")[0]
    except PackageNotFoundError:
        return NONE


def tested(root: Path) -> dict[str, str]:
    """The releases of constraints.txt, which were tested together, by package."""
    path = root / paths.CONSTRAINTS
    lines = path.read_text().splitlines() if path.exists() else []
    pins = (line.split(";")[0].split("#")[0].strip().partition("==") for line in lines)
    return {package.strip(): version.strip().split("+")[0] for package, _, version in pins if version}


@functools.lru_cache(maxsize=64)
def _version(package: str, places: tuple[tuple[str, int], ...]) -> str:
    """Cached, since every session asks for a dozen packages, each of which is looked for along the whole path."""
    return version(package)


def record(root: Path, definitions: dict[str, Definition]) -> Mapping[str, str]:
    """Write the installed versions to versions.yaml if it says otherwise; returns them."""
    found = installed(root, definitions)
    content = (_HEADER + yaml.safe_dump(dict(found))).encode()
    path = root / paths.VERSIONS
    if not path.exists() or path.read_bytes() != content:
        files.write_bytes(path, content)
    return found
