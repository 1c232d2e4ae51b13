"""Who is told in the morning: a run that failed, a new champion, a policy that got worse, a night with nothing to do.

`notify.events` in params.yaml says which of these are told; where to is a secret, so it is in the environment.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nightshift import config
from nightshift.errors import NightshiftError
from nightshift.pipeline import results as pipeline_results
from nightshift.pipeline.run import StageResult
from nightshift.project import paths
from nightshift.reports.gate import Verdict

ADDRESSES = "NIGHTSHIFT_NOTIFY"
"""Environment variable: one or more Apprise URLs."""


def failed(root: Path, error: BaseException) -> None:
    """Tell that a run ended with an error."""
    _tell(root, "failure", "the run failed", str(error) or type(error).__name__)


def killed(root: Path, runs: Sequence[str]) -> None:
    """Tell that runs were killed, which could not do it themselves."""
    if runs:
        _tell(root, "failure", "a run was killed", f"{', '.join(runs)}: the next run resumes what it was doing")


def missed(root: Path, why: str) -> None:
    """Tell that a night was left out."""
    _tell(root, "failure", "a night was missed", why)


def not_brought_in(root: Path, sentences: Sequence[str]) -> None:
    """Tell that a night worked without demos that it should have brought in."""
    _tell(root, "failure", "new demos could not be brought in", "\n".join(sentences))


def not_committed(root: Path, error: NightshiftError) -> None:
    """Tell that what a night made is not in git."""
    _tell(root, "failure", "the versions of a night are not committed", str(error))


def finished(root: Path, results: Sequence[StageResult]) -> None:
    """Tell what came out of a run."""
    did = {result.stage for result in results if result.status in ("ran", "restored")}
    if not did:
        _tell(root, "nothing_to_do", "nothing to do", "neither data, params nor code changed")
    elif "register" in did and (registration := pipeline_results.read(root).registration):
        _tell_verdict(root, registration)


def _tell_verdict(root: Path, registration: Mapping[str, Any]) -> None:
    name = f"{registration['model']} version {registration['version']}"
    if registration["verdict"] == Verdict.PROMOTED:
        _tell(root, "promotion", f"{name} is champion", registration["reason"])
    elif registration["verdict"] == Verdict.WORSE:
        _tell(root, "regression", f"{name} is worse than the champion", registration["reason"])
    elif registration["verdict"] == Verdict.NOT_COMPARED:
        _tell(root, "failure", f"{name} could not be compared with the champion", registration["reason"])


def _tell(root: Path, event: config.Event, title: str, body: str) -> None:
    addresses = os.environ.get(ADDRESSES)
    if addresses and event in _chosen(root):
        from nightshift.adapters import notifier

        notifier.send(addresses, f"Nightshift: {title}", f"{body}\n\n{socket.gethostname()}:{root}")


def _chosen(root: Path) -> tuple[config.Event, ...]:
    """A failure because of params.yaml itself is told too."""
    try:
        return config.load(root / paths.PARAMS).notify.events
    except NightshiftError:
        return ("failure",)
