"""A load into a folder that a buffer works in: decided in one step, carried out after it, if need be after a kill.

.incoming.partial-   being filled; whoever finds it removes it: the folder holds what it held
incoming             complete, with its index: this is what the folder holds, whatever else is in it
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from nightshift import files
from nightshift.data.replay.keeping import missing
from nightshift.data.tensors import SUFFIX
from nightshift.errors import DataError

_INCOMING = "incoming"
_PARTIAL = ".incoming.partial-"


@contextlib.contextmanager
def arriving(folder: Path) -> Iterator[Path]:
    """A folder to fill. Once the block ends without an error, `folder` holds what is in it, and is to be settled."""
    stage = folder / _PARTIAL
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir()
    try:
        yield stage
        files.sync(stage)
        stage.rename(folder / _INCOMING)
        files.sync(folder)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def valid(folder: Path) -> Path:
    """Where to read what the folder holds."""
    incoming = folder / _INCOMING
    return incoming if incoming.is_dir() else folder


def settle(folder: Path) -> None:
    """Put what has arrived in the place of all there was. It stays complete until that is done."""
    incoming = folder / _INCOMING
    if not incoming.is_dir():
        return
    for path in folder.glob(f"trajectory_*{SUFFIX}"):
        path.unlink()
    for path in incoming.iterdir():
        (folder / path.name).unlink(missing_ok=True)
        link(folder / path.name, path)
    files.sync(folder)
    incoming.rename(folder / _PARTIAL)
    shutil.rmtree(folder / _PARTIAL)


def link(path: Path, source: Path) -> None:
    """A second name for a file, which outlives the first; a copy where the disk has no such thing.

    Files of trajectories are replaced and removed but never changed, so two names for one are as good as two files.
    """
    try:
        os.link(source, path)
    except FileNotFoundError:
        raise missing(source) from None
    except OSError:
        shutil.copyfile(source, path)
        files.sync(path)


def link_checked(path: Path, source: Path, sha256: str) -> str:
    """As `link`, of a file that must still be what was written."""
    link(path, source)
    if files.sha256(path) != sha256:
        raise DataError(
            f"{source} is damaged: its sha256 is not that of what was written",
            "load the last checkpoint: it is as it was",
        )
    return sha256
