"""Replaces the trajectories in the folder of a buffer atomically: files are staged, then committed.

.incoming.partial-   files are being staged; after a kill it is deleted, and the folder keeps its old content
incoming             staged completely, with index: this is the content of the folder, even if a kill delays the commit
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from nightshift import files
from nightshift.data.replay.storage import missing
from nightshift.data.tensors import SUFFIX
from nightshift.errors import DataError

_STAGED = "incoming"
_PARTIAL = ".incoming.partial-"


@contextlib.contextmanager
def stage_files(folder: Path) -> Iterator[Path]:
    """A folder for new files, which become the content of `folder` when the block ends; call `commit_staged` next."""
    stage = folder / _PARTIAL
    shutil.rmtree(stage, ignore_errors=True)
    with files.translated_errors(folder):
        stage.mkdir()
        try:
            yield stage
            files.sync(stage)
            stage.rename(folder / _STAGED)
            files.sync(folder)
        finally:
            shutil.rmtree(stage, ignore_errors=True)


def current_folder(folder: Path) -> Path:
    """Where the current content of `folder` is: staged files that are not committed yet, or the folder itself."""
    staged = folder / _STAGED
    return staged if staged.is_dir() else folder


def commit_staged(folder: Path) -> None:
    """Replace the files in `folder` by the staged ones, which stay complete until all are in place."""
    staged = folder / _STAGED
    if not staged.is_dir():
        return
    with files.translated_errors(folder):
        for path in folder.glob(f"trajectory_*{SUFFIX}"):
            path.unlink()
        for path in staged.iterdir():
            (folder / path.name).unlink(missing_ok=True)
            link(folder / path.name, path)
        files.sync(folder)
        staged.rename(folder / _PARTIAL)
    shutil.rmtree(folder / _PARTIAL)


def link(path: Path, source: Path) -> None:
    """As `files.link_or_copy`, of a trajectory file that may be missing."""
    try:
        files.link_or_copy(source, path)
    except FileNotFoundError:
        raise missing(source) from None


def link_checked(path: Path, source: Path, sha256: str) -> str:
    """`link`, then verify the sha256 of the file."""
    link(path, source)
    if files.sha256(path) != sha256:
        raise DataError(
            f"{source} is damaged: its sha256 has changed since it was written",
            "load the last checkpoint",
        )
    return sha256
