"""What the stages `start` and `opponent` take from the registry."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nightshift import files
from nightshift.config import CHAMPION_LEFT_OUT
from nightshift.project import packages, paths

if TYPE_CHECKING:
    from nightshift.adapters.mlflow_registry import Champion

NOT_NEEDED = "not needed"


def find(model: str) -> Champion | None:
    """The champion of a model. A compute node has no registry: there nothing is taken from it."""
    if packages.on_compute_node():
        return None
    from nightshift.adapters import mlflow_registry

    return mlflow_registry.champion(Path(), model)


def leave(path: Path, champion: Champion | None) -> None:
    """Its policy and version; or a folder that is always the same, so that nothing that reads it becomes stale."""
    with files.new_folder(path) as folder:
        if champion is None:
            files.write_json(folder / paths.SKIPPED, {"skipped": NOT_NEEDED})
        else:
            champion.copy_policy(folder)
            files.write_json(folder / paths.CHAMPION_VERSION, {"version": champion.version})


def leave_out(path: Path, champion: Champion, why: str) -> None:
    """No policy, and why; the same folder for the same champion and reason."""
    left_out = {"version": champion.version, "why": why}
    with files.new_folder(path) as folder:
        files.write_json(folder / paths.SKIPPED, {"skipped": NOT_NEEDED, CHAMPION_LEFT_OUT: left_out})
