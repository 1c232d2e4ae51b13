"""The sources of episodes of a project, by name: the demos of the stage collect, and imports."""

from __future__ import annotations

from collections.abc import Sequence

from nightshift import files
from nightshift.data.episode_store import EpisodeStore
from nightshift.errors import DataError
from nightshift.project import paths

DEMOS = "demos"
"""The name of the source that the stage collect writes."""
ROLLOUTS = "rollouts"
"""The name of the source that `nightshift classifier record` writes, for the success classifier alone."""
ALL_IMPORTS = "imports"
"""Stands for every import there is."""


def names() -> list[str]:
    return [DEMOS, *imports()]


def imports() -> list[str]:
    return sorted(folder.name for folder in paths.IMPORTS.glob("[!.]*") if folder.is_dir())


def resolved(wanted: Sequence[str]) -> list[str]:
    """The names of dataset.sources with every import in place of `imports`; each once."""
    each = [imports() if name == ALL_IMPORTS else [name] for name in wanted]
    found = list(dict.fromkeys(name for group in each for name in group))
    if not found:
        raise DataError("dataset.sources is imports, and there are none", "nightshift import PATH --name NAME")
    return found


def open_store(source: str) -> EpisodeStore:
    """Open the episode store of a source after verifying all of its files."""
    if source not in names():
        raise DataError(f"there is no source {source!r}; there are {', '.join(names())}", remedy(source))
    folder = paths.DEMOS if source == DEMOS else paths.IMPORTS / source
    files.verify_folder(folder, remedy(source))
    return EpisodeStore(folder)


def remedy(source: str) -> str:
    """The next step for a source that is missing or damaged."""
    if source == DEMOS:
        return "run `nightshift run`: the collect stage makes the demos again"
    folder = paths.IMPORTS / source
    if (pointer := paths.IMPORTS / f"{source}.dvc").exists():
        return (
            f"restore it with `dvc pull --force {pointer}`, or `dvc checkout --force {pointer}` where it was imported"
        )
    again = f"delete {folder}, then " if folder.is_dir() else ""
    return f"{again}import it with `nightshift import PATH --format FORMAT --name {source}`, or name another source"
