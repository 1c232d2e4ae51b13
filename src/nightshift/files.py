"""Writing so that nothing is ever half-written: temporary name, fsync, rename; in a folder the manifest comes last."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import shutil
import tarfile
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BufferedWriter
from pathlib import Path
from typing import Any

from nightshift.errors import DataError, ProjectError

MANIFEST = "manifest.json"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_ASIDE = ".old-"
"""In the name of a whole folder while another takes its place, where the system cannot exchange the two."""
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_PIECE = 2 * 2**20
_WORTH_THREADS = 2**26
"""Bytes to read from which threads are faster: starting them takes longer than summing the code of a stage."""
_LARGE = 2**28
"""Bytes of a file for which an interrupted command would have to wait too long, if a thread summed it."""


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def json_sha256(value: Any) -> str:
    """Of a value as JSON, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def sums(digest: Callable[[Path], str], paths: Sequence[Path]) -> list[str]:
    """The digest of every file, in their order. Many are summed side by side: reading and hashing free the GIL. Large
    ones are summed by this thread, which a signal interrupts at once."""
    sizes = {path: path.stat().st_size for path in paths}
    if sum(size for size in sizes.values() if size < _LARGE) < _WORTH_THREADS:
        return [digest(path) for path in paths]
    threads = ThreadPoolExecutor(min(len(paths), os.cpu_count() or 1))
    try:
        begun = {path: threads.submit(digest, path) for path, size in sizes.items() if size < _LARGE}
        own = {path: digest(path) for path in sizes if path not in begun}
        return [own[path] if path in own else begun[path].result() for path in paths]
    finally:
        threads.shutdown(cancel_futures=True)


def identity(path: Path) -> str:
    """A digest that identifies the content of a file or folder, with as little reading as possible.

    A folder with a manifest is identified by the manifest alone: it holds the sha256 of every file and is written last.
    So 100 GB of episodes cost the reading of one small file. `verify_folder` checks the files themselves.
    """
    if not path.is_dir():
        return sha256(path)
    digest = hashlib.sha256()
    for file in _identifying_files(path):
        digest.update(f"{file.relative_to(path)} {sha256(file)}\n".encode())
    return digest.hexdigest()


def identity_or_missing(path: Path) -> str:
    return identity(path) if path.exists() else "missing"


def _identifying_files(folder: Path) -> Iterator[Path]:
    if (folder / MANIFEST).is_file():
        yield folder / MANIFEST
        return
    for child in sorted(child for child in folder.iterdir() if not _is_litter(Path(child.name))):
        if child.is_dir():
            yield from _identifying_files(child)
        elif child.is_file():
            yield child


def is_left_out(folder: Path) -> bool:
    """Whether all but its manifest was left out of an archive: it still identifies the folder, and cannot be read."""
    return folder.is_dir() and [entry.name for entry in folder.iterdir()] == [MANIFEST]


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` in one step: a reader sees the old file or the new one, never a part."""
    write_chunks(path, [content])


def write_chunks(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """As `write_bytes`, of content that is not in one piece."""
    with staged(path, chunks) as temporary:
        settle(temporary, path)


@contextlib.contextmanager
def staged(path: Path, chunks: Iterable[bytes | memoryview]) -> Iterator[Path]:
    """A temporary file beside `path` whose content has reached the disk; `settle` it, or it is gone after the block."""
    with translated_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _temporary(path)
        try:
            with temporary.open("wb") as stream:
                for chunk in chunks:
                    _write(stream, memoryview(chunk).cast("B"))
                stream.flush()
                os.fsync(stream.fileno())
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)


def settle(temporary: Path, path: Path) -> None:
    """Put a staged file in its place; when this returns it stays there through a power cut."""
    temporary.replace(path)
    sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


@contextlib.contextmanager
def new_folder(path: Path, known: Mapping[str, str] | None = None) -> Iterator[Path]:
    """A temporary folder beside `path` that takes its place, manifest last, when the block ends without an error.

    `known` may name the sha256 sums of files that were summed as they were written, so that they are not read again.
    """
    with translated_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep_temporaries(path.parent, path.name)
        temporary = _temporary(path)
        temporary.mkdir()
        try:
            yield temporary
            write_json(temporary / MANIFEST, {"sha256": _sums(temporary, known or {})})
            for file in temporary.rglob("*"):
                sync(file)
            _replace_folder(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        sync(path.parent)


def remove_folder(path: Path) -> None:
    """In one step: a kill leaves the whole folder, or a temporary name that `sweep_temporaries` removes."""
    with translated_errors(path):
        _remove(path, path)
        sync(path.parent)


def replace_by_copy(source: Path, path: Path) -> None:
    """A copy of a file or folder takes the place of `path` in one step; a folder brings its own manifest."""
    if not source.is_dir():
        write_bytes(path, source.read_bytes())
        return
    with translated_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep_temporaries(path.parent, path.name)
        temporary = _temporary(path)
        try:
            for file in (file for file in source.rglob("*") if file.is_file()):
                copy = temporary / file.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)  # without its mode: what was brought here may be read-only
            for copied in (temporary, *temporary.rglob("*")):
                sync(copied)
            _replace_folder(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        sync(path.parent)


def link_or_copy(source: Path, path: Path) -> None:
    """Hard-link a file, or copy it where that cannot be done, as between file systems.

    For files that are replaced or deleted but never modified: of these a hard link is as good as a copy.
    """
    try:
        os.link(source, path)
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError:
        shutil.copyfile(source, path)
        sync(path)


def verify_folder(path: Path, remedy: str, only: Collection[str] | None = None) -> Mapping[str, str]:
    """The sha256 sums a folder was written with, after checking each; `remedy` is the next step if one is off.

    `only` these files are checked, and must be in the manifest.
    """
    if not path.exists():
        _bring_back(path.parent, path.name)
    try:
        manifest: Mapping[str, str] = json.loads((path / MANIFEST).read_text())["sha256"]
    except FileNotFoundError:
        raise DataError(f"{path / MANIFEST} is missing: the folder is not complete", remedy) from None
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path / MANIFEST} is damaged", remedy) from None
    names = list(manifest if only is None else only)
    for name in names:
        if name not in manifest:
            raise DataError(f"{path / name} is not in {MANIFEST}", remedy)
    try:
        found = sums(sha256, [path / name for name in names])
    except FileNotFoundError as error:
        raise _missing(path, Path(error.filename), remedy) from None
    for name, digest in zip(names, found, strict=True):
        if digest != manifest[name]:
            raise DataError(f"{path / name} is damaged: its sha256 is not the one in {MANIFEST}", remedy)
    return manifest


def _missing(folder: Path, file: Path, remedy: str) -> DataError:
    if not is_left_out(folder):
        return DataError(f"{file} is missing", remedy)
    return DataError(
        f"{file} is missing: of the folder only {MANIFEST} is here, the rest was left out of an archive",
        f"bring the folder from where it was made, or {remedy}",
    )


def append_json(journal: Path, value: Any) -> None:
    """Add one line to a journal."""
    with translated_errors(journal):
        journal.parent.mkdir(parents=True, exist_ok=True)
        with journal.open("a") as stream:
            stream.write(json.dumps(value) + "\n")


def write_journal(journal: Path, values: Iterable[Any]) -> None:
    """Replace a journal."""
    write_bytes(journal, "".join(json.dumps(value) + "\n" for value in values).encode())


def read_journal(journal: Path) -> list[Any]:
    """The values that were written whole; a last line that a kill cut short is removed."""
    if not journal.exists():
        return []
    *lines, cut = journal.read_bytes().split(b"\n")
    if cut:
        write_bytes(journal, b"".join(line + b"\n" for line in lines))
    return [json.loads(line) for line in lines]


def refusal(error: OSError, path: Path | None = None) -> ProjectError | None:
    """The sentence for a disk that is full or a path where no file can be written; None for any other error."""
    where = path or error.filename2 or error.filename or "the project"  # the second is the target of a copy
    if error.errno in DISK_FULL:
        return ProjectError(
            f"no space left on the disk that holds {where}", "free some space and run again: it resumes"
        )
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR):
        return ProjectError(f"{where} cannot be written: {error.strerror}", "make the folder writable and run again")
    if error.errno == errno.EISDIR:
        return ProjectError(f"{where} is a folder, and not a file", "move it to another place and run again")
    if error.errno == errno.ENAMETOOLONG:
        return ProjectError(f"{where} is too long for the name of a file", "use shorter names")
    return None


def sweep_temporaries(folder: Path, name: str = "*") -> None:
    """Remove what a killed process left half-written of `name`, or of everything in the folder."""
    _bring_back(folder, name)
    for leftover in folder.glob(f".{name}.partial-*"):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, have reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_litter(path: Path) -> bool:
    """Interpreter caches and editors' swap and backup files; .dvcignore names the same."""
    return "__pycache__" in path.parts or path.name.startswith((".", "#")) or path.name.endswith("~")


def _temporary(path: Path) -> Path:
    return path.parent / f".{path.name}.partial-{uuid.uuid4().hex[:8]}"


def _sums(folder: Path, known: Mapping[str, str]) -> dict[str, str]:
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    names = {file: str(file.relative_to(folder)) for file in files}
    unknown = [file for file, name in names.items() if not known.get(name)]
    found = {names[file]: digest for file, digest in zip(unknown, sums(sha256, unknown), strict=True)}
    return {name: known.get(name) or found[name] for name in names.values()}


def _replace_folder(new: Path, path: Path) -> None:
    if not path.exists():
        new.rename(path)
        return
    old = new
    if not _exchange(new, path):
        old = path.parent / f".{path.name}{_ASIDE}{uuid.uuid4().hex[:8]}"
        path.rename(old)
        new.rename(path)
    sync(path.parent)
    _remove(old, path)


def _remove(old: Path, path: Path) -> None:
    """Delete what `path` was before; under a name that says so from the start, since a kill may leave a part of it."""
    leftover = _temporary(path)
    old.rename(leftover)
    shutil.rmtree(leftover)


def _bring_back(folder: Path, name: str) -> None:
    """Where a kill came between the two names of a folder that was being replaced, the old one is in force again."""
    for aside in folder.glob(f".{name}{_ASIDE}*"):
        path = folder / aside.name[1:].rpartition(_ASIDE)[0]
        _remove(aside, path) if path.exists() else aside.rename(path)


def _exchange(left: Path, right: Path) -> bool:
    """Swap two names in one step, so that a kill never finds neither; False where the system has no such call."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(left), _AT_FDCWD, os.fsencode(right), _RENAME_EXCHANGE) == 0)


def _write(stream: BufferedWriter, content: memoryview) -> None:
    """Write, and have the disk begin at once with what is large: `fsync` then waits for the rest only."""
    for start in range(0, len(content), _PIECE):
        position = stream.tell()
        size = stream.write(content[start : start + _PIECE])
        if size == _PIECE and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(stream.fileno(), position, size, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def translated_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's errors into errors for people."""
    try:
        yield
    except OSError as error:
        raise (refusal(error, path) or error) from error


def extract(tar: tarfile.TarFile, folder: Path) -> None:
    """All of an archive, of which nothing may land outside the folder."""
    if hasattr(tarfile, "data_filter"):
        tar.extractall(folder, filter="data")
        return
    for member in tar.getmembers():  # Python before 3.11.4
        path = Path(member.name)
        if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
            raise tarfile.ExtractError(f"{member.name} is neither a file nor a folder in it")
    tar.extractall(folder)
