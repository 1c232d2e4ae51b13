"""Versions of an output: every state that git has seen dvc.lock record for it, newest first."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from nightshift.errors import CacheError
from nightshift.project import graph, paths
from nightshift.project.repository import git

WORKSPACE = "workspace"


@dataclass(frozen=True, kw_only=True)
class Version:
    """Example: Version(revision="v1", md5="2bb1….dir", date="2026-01-31", subject="first demos")"""

    revision: str
    """A git tag where there is one, else the commit; "workspace" for what is in the folder now."""
    md5: str
    date: str
    subject: str


def versions(root: Path, out: Path) -> list[Version]:
    """The workspace, then each commit that changed the output's recorded md5."""
    found = [Version(revision=WORKSPACE, md5=graph.recorded_md5(root, out), date="now", subject="the folder as it is")]
    log = git(root, "log", "--format=%H%x09%cs%x09%D%x09%s", "--", str(paths.DVC_LOCK))
    history = []
    for line in log.splitlines():
        commit, date, names, subject = line.split("\t", 3)
        md5 = _md5_at(root, commit, out)
        if md5:
            history.append(Version(revision=_name(commit, names), md5=md5, date=date, subject=subject))
    tagged = [_tagged(root, tag, out) for tag in git(root, "tag", "--list", "--sort=-creatordate").splitlines()]
    known = {version.revision for version in history}
    history += [version for version in tagged if version and version.revision not in known]
    return [*(version for version in found if version.md5), *_changes(history)]


def _changes(history: list[Version]) -> list[Version]:
    """Of neighbours with the same md5 the oldest, which introduced it; tags are always worth a line."""
    kept = []
    for index, version in enumerate(history):
        older = history[index + 1].md5 if index + 1 < len(history) else ""
        if older != version.md5 or not _is_hash(version.revision):
            kept.append(version)
    return kept


def _is_hash(revision: str) -> bool:
    return len(revision) == 10 and all(c in "0123456789abcdef" for c in revision)  # noqa: PLR2004


def _name(commit: str, decorations: str) -> str:
    tags = [name.removeprefix("tag: ") for name in decorations.split(", ") if name.startswith("tag: ")]
    return tags[0] if tags else commit[:10]


def _tagged(root: Path, tag: str, out: Path) -> Version | None:
    date, subject = git(root, "log", "-1", "--format=%cs%x09%s", tag).split("\t", 1)
    md5 = _md5_at(root, tag, out)
    return Version(revision=tag, md5=md5, date=date, subject=subject) if md5 else None


def _md5_at(root: Path, revision: str, out: Path) -> str:
    try:
        return graph.md5_in(git(root, "show", f"{revision}:./{paths.DVC_LOCK}"), out)
    except subprocess.CalledProcessError:
        return ""


def resolve(root: Path, revision: str) -> None:
    """CacheError unless git knows the revision."""
    if revision == WORKSPACE:
        return
    try:
        git(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    except subprocess.CalledProcessError:
        raise CacheError(f"git has no revision {revision!r}", "nightshift dataset ls shows the versions") from None
