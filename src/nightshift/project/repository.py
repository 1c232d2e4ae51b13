"""The folder a run works in: params.yaml at its root, writable and, where DVC records results, a git repository."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from nightshift import files
from nightshift.errors import ProjectError
from nightshift.project import paths

UNKNOWN = "unknown"
_PRIVATE = 0o700
"""Databases and logs of Prefect and MLflow are for the owner of the project alone."""


def find(start: Path) -> Path:
    """The project's root: the nearest folder upwards with a dvc.yaml, so commands work from a subfolder too."""
    for folder in (start, *start.parents):
        if (folder / paths.DVC_YAML).is_file():
            return folder
    raise ProjectError(f"{start} is not inside a Nightshift project: no {paths.DVC_YAML} here or above", "cd to it")


def check_folder(root: Path) -> None:
    """What a stage needs of the folder; ProjectError says what is missing and the command that mends it."""
    if not (root / paths.PARAMS).is_file():
        raise ProjectError(f"{root / paths.PARAMS} does not exist", f"git checkout -- {paths.PARAMS}")
    _check_writable(root)


def check(root: Path) -> None:
    """What a pipeline needs of the folder: that of a stage, and a git repository with a commit."""
    check_folder(root)
    try:
        git(root, "rev-parse", "--git-dir")
    except FileNotFoundError:
        raise ProjectError("git is not installed", "apt-get install git") from None
    except subprocess.CalledProcessError as error:
        _explain_no_repository(root, error)
    try:
        git(root, "rev-parse", "--verify", "HEAD")
    except subprocess.CalledProcessError:
        raise ProjectError(
            f"the git repository {root} has no commit yet", 'git add -A && git commit -m "start"'
        ) from None


def commit(root: Path) -> str:
    """The short hash of HEAD, with "+" when tracked files differ from it; those that every run writes may.

    "unknown" on a compute node without git, or where the code arrived without its history. A copy of the project says
    itself what its code is of: it may lie in the folder of a project that has gone on since.
    """
    if (root / paths.COPIED_COMMIT).exists():
        return (root / paths.COPIED_COMMIT).read_text().strip()
    try:
        head = git(root, "rev-parse", "--short=12", "HEAD")
    except (FileNotFoundError, subprocess.CalledProcessError):
        return UNKNOWN
    written = [f":!{path}" for path in (paths.DVC_LOCK, paths.REPORT_POINTER)]
    changed = git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", *written)
    return head + ("+" if changed else "")


def git(root: Path, *arguments: str) -> str:
    """The output of a git command in `root`."""
    done = subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def clone(root: Path, commit: str, folder: Path) -> None:
    """A clone of the repository at this commit. The folder is there when it is complete, also after a power cut."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    files.sweep_temporaries(folder.parent, folder.name)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.partial-") as scratch:
        new = Path(scratch) / "clone"
        git(root, "clone", "--quiet", "--no-checkout", str(root), str(new))
        git(new, "checkout", "--quiet", "--detach", commit)
        for path in (new, *new.rglob("*")):
            if not path.is_symlink():
                files.sync(path)
        new.rename(folder)
    files.sync(folder.parent)


def commit_files(root: Path, changed: Sequence[Path], message: str) -> str:
    """Commit these files and nothing else; the short hash, or empty if none of them changed."""
    names = [path.as_posix() for path in changed if (root / path).exists()]
    if not names:  # git would take no path for all of them
        return ""
    try:
        git(root, "add", "--", *names)
        if not git(root, "status", "--porcelain", "--", *names):
            return ""
        git(root, *_identity(root), "commit", "--quiet", "--only", "-m", message, "--", *names)
    except subprocess.CalledProcessError as error:
        raise ProjectError(
            f"git refused to commit {', '.join(names)}: {(error.stderr or error.stdout).strip()}",
            "commit them by hand, or nightly.commit: false",
        ) from None
    return git(root, "rev-parse", "--short=12", "HEAD")


def _identity(root: Path) -> list[str]:
    """Options of git that name an author, where the user has not."""
    try:
        git(root, "config", "user.email")
        return []
    except subprocess.CalledProcessError:
        return ["-c", "user.name=nightshift", "-c", "user.email=nightshift@localhost"]


def _explain_no_repository(root: Path, error: subprocess.CalledProcessError) -> None:
    if "dubious ownership" in str(error.stderr):
        raise ProjectError(
            f"git does not trust {root}: another user owns it", f"git config --global --add safe.directory {root}"
        ) from None
    first = 'git init && git add -A && git commit -m "start"'
    raise ProjectError(f"{root} is not a git repository, and the data versions live in one", first) from None


def _check_writable(root: Path) -> None:
    try:
        with tempfile.NamedTemporaryFile(dir=root, prefix=".nightshift-", suffix=".probe"):
            (root / paths.STATE).mkdir(exist_ok=True)
            (root / paths.STATE).chmod(_PRIVATE)
    except OSError as error:
        user = os.environ.get("USER", "$USER")
        raise ProjectError(
            f"{root} cannot be written: {error.strerror}", f"sudo chown -R {user} {root}, or clone it elsewhere"
        ) from error
