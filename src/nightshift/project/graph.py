"""dvc.yaml as plain data: which params, versions, inputs and outputs each stage names. Reading it needs no DVC."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nightshift import config
from nightshift.errors import ConfigError, ProjectError
from nightshift.project import paths


@dataclass(frozen=True, kw_only=True)
class Definition:
    """One stage of dvc.yaml.

    Example: Definition(name="sft", params=("seed", "sft"), versions=("torch",), deps=(Path("data/dataset"),), outs=…)
    """

    name: str
    params: tuple[str, ...]
    """Sections of params.yaml, or numbers in them by dotted name."""
    versions: tuple[str, ...]
    """Packages whose installed versions are part of its cache key (versions.yaml)."""
    deps: tuple[Path, ...]
    outs: tuple[Path, ...]


def load(root: Path) -> dict[str, Definition]:
    """Every stage of dvc.yaml by name, in the order of the file."""
    try:
        if not (root / paths.DVC_YAML).exists():
            raise FileNotFoundError
        stages = config.read_yaml(root / paths.DVC_YAML)["stages"]
        return {name: _definition(name, stage) for name, stage in stages.items()}
    except FileNotFoundError:
        raise ProjectError(f"{root / paths.DVC_YAML} does not exist", f"git checkout -- {paths.DVC_YAML}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise ProjectError(
            f"{root / paths.DVC_YAML} cannot be read: {error}", f"git diff -- {paths.DVC_YAML}"
        ) from None


def check_lock(root: Path) -> None:
    """ProjectError if dvc.lock cannot be read: without it, or with another, everything counts as never run."""
    path = root / paths.DVC_LOCK
    again = f"git checkout -- {paths.DVC_LOCK}; results in the cache are found again"
    if not path.exists():
        return
    try:
        content = config.read_yaml(path)
    except ConfigError as error:
        raise ProjectError(error.what, again) from None
    if not isinstance(content, dict) or "schema" not in content:
        raise ProjectError(f"{path} is damaged: it has no schema", again)


def check_pointers(root: Path) -> None:
    """ConfigError if git left a conflict in DVC's settings or in a .dvc file, which DVC itself does not call so."""
    settings, imports = (root / paths.DVC).glob("config*"), (root / paths.IMPORTS).glob("*.dvc")
    for path in (*settings, *imports, root / paths.REPORT_POINTER):
        if path.is_file():
            config.check_conflict(path, path.read_text(errors="replace"), str(path.relative_to(root)))


def code(definitions: dict[str, Definition]) -> set[Path]:
    """The inputs that are source code: not made by a stage, and not imported data."""
    made = {out for definition in definitions.values() for out in definition.outs}
    inputs = {dep for definition in definitions.values() for dep in definition.deps} - made
    return {dep for dep in inputs if not dep.is_relative_to(paths.IMPORTS)}


def packages(definitions: dict[str, Definition]) -> set[str]:
    """Every package whose version is part of a cache key."""
    return {package for definition in definitions.values() for package in definition.versions}


def _definition(name: str, stage: dict[str, Any]) -> Definition:
    params = stage.get("params", [])
    other_files = [entry for entry in params if isinstance(entry, dict)]
    return Definition(
        name=name,
        params=tuple(entry for entry in params if isinstance(entry, str)),
        versions=tuple(key for entry in other_files for key in entry.get(str(paths.VERSIONS), ())),
        deps=tuple(Path(dep) for dep in stage.get("deps", [])),
        outs=tuple(Path(next(iter(out)) if isinstance(out, dict) else out) for out in stage.get("outs", [])),
    )


def recorded_md5(root: Path, out: Path) -> str:
    """The md5 that dvc.lock records for an output: its version."""
    return md5_in((root / paths.DVC_LOCK).read_text(), out) if (root / paths.DVC_LOCK).exists() else ""


def md5_in(lock: str, out: Path) -> str:
    """The md5 of an output in the text of a dvc.lock; empty if it names none."""
    stages = (yaml.load(lock, config.YAML_LOADER) or {}).get("stages") or {}
    outs = [entry for stage in stages.values() for entry in stage.get("outs", [])]
    return next((str(entry["md5"]) for entry in outs if entry["path"] == out.as_posix()), "")
