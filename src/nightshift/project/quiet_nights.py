"""Nights that may have left no run in MLflow, a line each: the page of all nights has a row for them, too."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock

from nightshift import files
from nightshift.errors import NightshiftError
from nightshift.project import paths

Outcome = Literal["idle", "missed", "refused", "failed"]

KEPT = 1000
"""The newest lines, which are all that the file ever has."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class QuietNight:
    """Example: QuietNight(started=…, ended=…, outcome="missed", why="9.0 h late, and catch_up_hours is 6")"""

    started: datetime
    ended: datetime
    outcome: Outcome
    why: str


def add(root: Path, started: datetime, outcome: Outcome, why: str) -> None:
    """Keep a night that ends now. If that cannot be written, the night ends as it would have, with a warning."""
    night = QuietNight(started=started, ended=datetime.now(UTC), outcome=outcome, why=why)
    path = root / paths.QUIET_NIGHTS
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            lines = [*map(_line, read(root)), _line(night)][-KEPT:]
            files.write_bytes(path, "".join(lines).encode())
    except (NightshiftError, OSError) as error:
        _log.warning("the page of all nights will not have this one: %s", error)


def read(root: Path) -> list[QuietNight]:
    """Oldest first; a damaged line is left out."""
    path = root / paths.QUIET_NIGHTS
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return [night for line in lines if (night := _parsed(line))]


def _line(night: QuietNight) -> str:
    return json.dumps(asdict(night), default=datetime.isoformat) + "\n"


def _parsed(line: str) -> QuietNight | None:
    try:
        fields: dict[str, Any] = json.loads(line)
        times = {name: datetime.fromisoformat(fields[name]) for name in ("started", "ended")}
        return QuietNight(**{**fields, **times})
    except (ValueError, TypeError, KeyError):
        return None
