"""The site of all nights: one page with the trend and a row per night, beside the reports that it links to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nightshift import files
from nightshift.adapters import mlflow_reports
from nightshift.adapters.mlflow_reports import NightRun
from nightshift.adapters.model_versions import PipelineRun, Version
from nightshift.pipeline.report import svg
from nightshift.pipeline.report.templating import environment
from nightshift.project import paths, quiet_nights
from nightshift.project.quiet_nights import QuietNight
from nightshift.reports.gate import Verdict
from nightshift.statistics.intervals import Rate

INDEX = "index.html"
STAMP = "%Y%m%dT%H%M%SZ"
_STATUS_MARKS = {"failed": "failed", "killed": "failed", "running": "open"}


@dataclass(frozen=True, kw_only=True)
class Night:
    started: datetime
    seconds: float | None
    mark: str
    promoted: bool
    """Whether its version became champion; the mark `champion` also has one that was it before."""
    verdict: str
    changed: str
    rate: Rate | None
    champion: Rate | None
    """The champion that it was compared with."""
    grid: str
    commit: str
    page: str
    """File name of its report; empty where there is none."""


def write(root: Path) -> Path:
    """Make the site anew from MLflow and the nights without a run there; returns its first page."""
    with files.new_folder(root / paths.NIGHTS) as folder:
        found = [night for run in mlflow_reports.nights(root, folder) for night in _nights(run)]
        quiet = [_quiet(night) for night in quiet_nights.read(root) if not _has_run(night, found)]
        nights = sorted(found + quiet, key=lambda night: night.started, reverse=True)
        (folder / INDEX).write_text(render(nights))
    return root / paths.NIGHTS / INDEX


def render(nights: Sequence[Night]) -> str:
    """Newest first."""
    return environment().get_template("nights.html.j2").render(nights=nights, trend=trend(nights))


def trend(nights: Sequence[Night]) -> Any:
    """Success of the evaluated nights on the newest grid, oldest first; rates on other init states do not compare."""
    evaluated = [night for night in reversed(nights) if night.rate is not None]
    comparable = [night for night in evaluated if night.grid == evaluated[-1].grid]
    points, champions = [], []
    for night in comparable:
        assert night.rate is not None
        points.append((f"{night.started:%d %b}", night.rate, night.promoted))
        standing = night.rate if night.mark == "champion" else night.champion
        champions.append(standing.rate if standing else None)
    return svg.trend(points, champions, f"success of {len(points)} nights; numbers in the table") if points else None


def _nights(night: NightRun) -> list[Night]:
    """Of a run without a report, what MLflow itself knows."""
    return [_reported(stamp, row) for stamp, row in night.reports.items()] or [_unreported(night.run, night.version)]


def _reported(stamp: str, row: Mapping[str, Any]) -> Night:
    return Night(
        started=datetime.strptime(stamp, STAMP).replace(tzinfo=UTC),
        seconds=row.get("seconds"),
        mark=row.get("mark", "open"),
        promoted=row.get("promoted", False),
        verdict=row.get("verdict", ""),
        changed=row.get("changed", ""),
        rate=_rate(row.get("success")),
        champion=_rate(row.get("champion")),
        grid=row.get("grid", ""),
        commit=row.get("commit", ""),
        page=f"{stamp}.html",
    )


def _unreported(run: PipelineRun, version: Version | None) -> Night:
    promoted = version is not None and version.verdict == Verdict.PROMOTED
    mark = _STATUS_MARKS.get(run.status, "open")
    if version:
        mark = "champion" if promoted else "challenger"
    return Night(
        started=run.started.astimezone(UTC),
        seconds=run.seconds,
        mark=mark,
        promoted=promoted,
        verdict=version.reason if version else f"{run.name}: {run.status}, without a report",
        changed="",
        rate=version.result if version else None,
        champion=None,
        grid=version.grid if version else "",
        commit=run.commit,
        page="",
    )


def _has_run(quiet: QuietNight, nights: Sequence[Night]) -> bool:
    """Whether one of the nights of MLflow is this one: a night that failed has a run if it came so far."""
    began = quiet.started.replace(microsecond=0)  # a stamp has whole seconds
    return any(began <= night.started <= quiet.ended for night in nights)


def _quiet(night: QuietNight) -> Night:
    return Night(
        started=night.started,
        seconds=None if night.outcome == "missed" else (night.ended - night.started).total_seconds(),
        mark=night.outcome,
        promoted=False,
        verdict=night.why,
        changed="",
        rate=None,
        champion=None,
        grid="",
        commit="",
        page="",
    )


def _rate(figures: Mapping[str, Any] | None) -> Rate | None:
    if not figures or not figures.get("episodes"):
        return None
    return Rate(int(figures["successes"]), int(figures["episodes"]))
