"""What a run did, for the report: kept in .state/run.json, so that `nightshift report` can write the page again.

A run that was refused before its first stage has a file of its own: the results are still those of the run before.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from nightshift import files
from nightshift.errors import NightshiftError
from nightshift.pipeline.run import StageResult
from nightshift.project import paths

UNCHANGED = ("cached", "skipped")
LOG_HINT = "read the log above the error; what is done is cached, so run again after mending it: nightshift run"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a run ended early. Example: Failure(stage="rloo", what="a simulator worker failed", next_step="run again")"""

    stage: str
    what: str
    next_step: str

    @classmethod
    def of(cls, error: Exception, stage: str) -> Failure:
        if isinstance(error, NightshiftError):
            return cls(stage=stage, what=error.what, next_step=error.next_step)
        return cls(stage=stage, what=f"{type(error).__name__}: {error}".strip(": "), next_step=LOG_HINT)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    started: datetime
    seconds: float
    stages: Sequence[StageResult]
    failure: Failure | None = None

    @property
    def stamp(self) -> str:
        """Names the run's report; sorts by time. Example: 20261116T031500Z"""
        return f"{self.started:%Y%m%dT%H%M%SZ}"

    @property
    def changed(self) -> tuple[str, ...]:
        """The stages that have another result since."""
        return tuple(result.stage for result in self.stages if result.status not in UNCHANGED)

    @property
    def is_refusal(self) -> bool:
        """Whether it ended before a stage began."""
        return self.failure is not None and not self.failure.stage and not self.changed


def write(root: Path, record: RunRecord) -> None:
    path = paths.REFUSAL_RECORD if record.is_refusal else paths.RUN_RECORD
    files.write_json(root / path, {**asdict(record), "started": record.started.isoformat()})
    if not record.is_refusal:
        forget_refusal(root)


def forget_refusal(root: Path) -> bool:
    """Once a run was let through; whether the one before it was refused."""
    was_refused = (root / paths.REFUSAL_RECORD).exists()
    (root / paths.REFUSAL_RECORD).unlink(missing_ok=True)
    return was_refused


def read(root: Path) -> RunRecord | None:
    """Of the last run that was not refused; None if there was none, or its file is damaged."""
    return _read(root / paths.RUN_RECORD)


def read_refusal(root: Path) -> RunRecord | None:
    """Of the last run, if it was refused."""
    return _read(root / paths.REFUSAL_RECORD)


def _read(path: Path) -> RunRecord | None:
    try:
        content = json.loads(path.read_text())
        return RunRecord(
            started=datetime.fromisoformat(content["started"]).astimezone(UTC),
            seconds=content["seconds"],
            stages=[StageResult(**{**stage, "reasons": tuple(stage["reasons"])}) for stage in content["stages"]],
            failure=Failure(**content["failure"]) if content["failure"] else None,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
