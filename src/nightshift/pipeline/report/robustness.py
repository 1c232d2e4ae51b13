"""The page of `nightshift robustness`: curves over strength, a heat map, a comparison and films of failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nightshift import files
from nightshift.pipeline.report import svg
from nightshift.pipeline.report.templating import data_uri, environment
from nightshift.project import paths
from nightshift.reports.robustness import compared, limits
from nightshift.statistics.intervals import Rate

Report = Mapping[str, Any]


def write(root: Path, report: Report) -> None:
    """Beside the report."""
    page = environment().get_template("robustness.html.j2").render(robustness=shown(root, report))
    files.write_bytes(root / paths.ROBUSTNESS_PAGE, page.encode())


def shown(root: Path, report: Report) -> dict[str, Any]:
    """What the template shows of the report."""
    first, *others = report["policies"]
    return {
        "report": report,
        "verdict": verdict(report),
        "compared": compared(report) if report["against"] else {},
        "limits": limits(report),
        "curves": [_curve(report, name, first, others[0] if others else None) for name in first["perturbations"]],
        "heat": [{"player": player, "rows": _heat(report, player)} for player in report["policies"]],
        "films": [_film(root, film) for film in report["films"] if _strip(root, film).exists()],
    }


def verdict(report: Report) -> str:
    """One sentence."""
    first = report["policies"][0]
    calm = first["unperturbed"]["overall"]["rate"]
    if not first["perturbations"]:
        return f"{first['name']} solves {100 * calm:.0f} % without a perturbation"
    lowest = {
        name: min(rate.rate for strength, rate in _points(first, name) if strength) for name in first["perturbations"]
    }
    worst = min(lowest, key=lambda name: lowest[name])
    return (
        f"{first['name']} solves {100 * calm:.0f} % without a perturbation, and {100 * lowest[worst]:.0f} % under the "
        f"worst, {worst}"
    )


def _curve(report: Report, name: str, player: Report, other: Report | None) -> dict[str, Any]:
    points = _points(player, name)
    words = "; ".join(f"strength {strength:g}: {100 * rate.rate:.0f} %" for strength, rate in points)
    return {
        "name": name,
        "chart": svg.strength_curve(points, _points(other, name) if other else (), f"Success under {name}: {words}"),
        **report["perturbations"][name],
    }


def _points(player: Report, name: str) -> list[tuple[float, Rate]]:
    """Without a perturbation and under it, at the strengths that have a valid episode."""
    cells = [(0.0, player["unperturbed"]["overall"])]
    cells += [(cell["strength"], cell["overall"]) for cell in player["perturbations"][name]]
    return [(strength, Rate(rate["successes"], rate["episodes"])) for strength, rate in cells if rate["episodes"]]


def _heat(report: Report, player: Report) -> list[dict[str, Any]]:
    """A row per perturbation, with None in the strengths that it has not; with several tasks, a row per task too."""
    rows = []
    tasks: Sequence[str] = report["tasks"] if len(report["tasks"]) > 1 else ()
    for name, cells in player["perturbations"].items():
        known = {cell["strength"]: cell for cell in cells}
        found = [known.get(strength) for strength in report["strengths"]]
        rows.append({"name": name, "task": "", "rates": [cell and cell["overall"] for cell in found]})
        for task in tasks:
            rows.append({"name": name, "task": task, "rates": [cell and cell["tasks"][task] for cell in found]})
    return rows


def _film(root: Path, film: Mapping[str, Any]) -> dict[str, Any]:
    """With the MP4 where one was encoded."""
    file = root / paths.ROBUSTNESS / film["file"]
    video = data_uri("video/mp4", file.read_bytes()) if file.exists() else None
    return {**film, "video": video, "strip": data_uri("image/jpeg", _strip(root, film).read_bytes())}


def _strip(root: Path, film: Mapping[str, Any]) -> Path:
    return root / paths.ROBUSTNESS / Path(film["file"]).with_suffix(".jpg")
