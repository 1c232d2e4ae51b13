"""md5 sums of files and folders as DVC computes them, on machines where DVC is not installed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from nightshift import files

DVCIGNORE = Path(".dvcignore")
MISSING = "missing"
_LARGE = 1 << 26
"""Bytes from which a sum is remembered while the process lives. A smaller file can be written twice within one tick of
the file system's clock, and its time of change does not tell."""


def md5(root: Path, path: Path) -> str:
    """Of a file its md5; of a folder the md5 of the list of its files, ending in ".dir". `path` is relative to `root`,
    where .dvcignore names files that do not count."""
    if (root / path).is_file():
        return _md5(root / path)
    if not (root / path).is_dir():
        return MISSING
    counted = sorted(_counted(root, path, _patterns(root)), key=lambda file: file.relative_to(path).as_posix())
    sums = files.sums(_md5, [root / file for file in counted])
    entries = [
        {"md5": md5, "relpath": file.relative_to(path).as_posix()} for file, md5 in zip(counted, sums, strict=True)
    ]
    return hashlib.md5(json.dumps(entries, sort_keys=True).encode(), usedforsecurity=False).hexdigest() + ".dir"


def _md5(path: Path) -> str:
    found = path.stat()
    if found.st_size < _LARGE:
        return _md5_of_content(path)
    changed = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return _md5_of_unchanged(path, changed)


@cache
def _md5_of_unchanged(path: Path, changed: tuple[int, ...]) -> str:
    """A model of 15 GB is the input of three stages: it is read once. `changed` differs if the file has changed."""
    return _md5_of_content(path)


def _md5_of_content(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _counted(root: Path, folder: Path, patterns: Sequence[str]) -> Iterator[Path]:
    with os.scandir(root / folder) as entries:
        for entry in entries:
            path = folder / entry.name
            if _ignored(path, entry.is_dir(), patterns):
                continue
            if entry.is_dir():
                yield from _counted(root, path, patterns)
            else:
                yield path


def _ignored(path: Path, is_folder: bool, patterns: Sequence[str]) -> bool:
    """The three kinds of pattern that .dvcignore here has: /a/path from the root, a folder's name/, a file's name."""
    return any(
        path.as_posix() == pattern[1:]
        if pattern.startswith("/")
        else fnmatch(path.name, pattern.rstrip("/")) and (is_folder or not pattern.endswith("/"))
        for pattern in patterns
    )


def _patterns(root: Path) -> list[str]:
    if not (root / DVCIGNORE).exists():
        return []
    lines = (line.strip() for line in (root / DVCIGNORE).read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]
