"""What a run did, for the report: kept in .state/run.json, so that `nightshift report` can write the page again."""

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


def write(root: Path, record: RunRecord) -> None:
    files.write_json(root / paths.RUN_RECORD, {**asdict(record), "started": record.started.isoformat()})


def read(root: Path) -> RunRecord | None:
    """Of the last run; None if there was none, or its file is damaged."""
    try:
        content = json.loads((root / paths.RUN_RECORD).read_text())
        return RunRecord(
            started=datetime.fromisoformat(content["started"]).astimezone(UTC),
            seconds=content["seconds"],
            stages=[StageResult(**{**stage, "reasons": tuple(stage["reasons"])}) for stage in content["stages"]],
            failure=Failure(**content["failure"]) if content["failure"] else None,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
