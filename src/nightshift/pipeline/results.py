"""What came out of a pipeline as metrics, tags and words: for its run in MLflow, and for whatever reports on it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nightshift import files
from nightshift.config import CHAMPION
from nightshift.project import paths
from nightshift.project.environment import mlflow_pages
from nightshift.reports import tables
from nightshift.reports.gate import Verdict
from nightshift.telemetry import metric_names as names

MADE_BY = ("evaluate", "register")
"""The stages whose outputs are results."""


@dataclass(frozen=True, kw_only=True)
class Results:
    evaluation: Mapping[str, Any]
    """evaluation.json; empty before the evaluation."""
    registration: Mapping[str, Any]
    """registration.json of this evaluation; empty before the gate."""

    @property
    def best(self) -> Mapping[str, Any]:
        """The candidate that the evaluation found best, with `overall`, `tasks` and `gain`; empty if there is none."""
        found = [c for c in self.evaluation.get("candidates", []) if c["name"] == self.evaluation["best"]]
        return found[0] if found else {}


def read(root: Path) -> Results:
    """As the files say. A registration of another evaluation does not count."""
    outcomes = root / paths.EVALUATION_OUTCOMES
    evaluated = files.sha256(outcomes) if outcomes.exists() else "nothing"
    registration = read_json(root / paths.RECEIPT)
    return Results(
        evaluation=read_json(root / paths.EVALUATION_REPORT),
        registration=registration if registration.get("outcomes") == evaluated else {},
    )


def metrics(found: Results) -> dict[str, float]:
    """By the names of telemetry/metric_names.py."""
    best = found.best
    if not best:
        return {}
    overall = best["overall"]
    values = {
        names.SUCCESS: overall["rate"],
        names.SUCCESS_LOW: overall["low"],
        names.SUCCESS_HIGH: overall["high"],
        names.EPISODES: overall["episodes"],
        names.INVALID: best["invalid"],
    }
    values |= {names.candidate_success(c["name"]): c["overall"]["rate"] for c in found.evaluation["candidates"]}
    values |= {names.suite_success(suite): rate["rate"] for suite, rate in tables.suites(best).items()}
    values |= {names.task_success(task): rate["rate"] for task, rate in best["tasks"].items()}
    if gain := best["gain"]:
        values |= {names.GAIN: gain["gain"], names.GAIN_LOW: gain["low"], names.GAIN_HIGH: gain["high"]}
        values[names.GAIN_P_VALUE] = gain["p_value"]
    if champion := found.evaluation.get(CHAMPION):
        values[names.CHAMPION_SUCCESS] = champion["overall"]["rate"]
        values[names.CHAMPION_GAIN] = champion["best_gain"]["gain"]
    return values | _gate_metrics(found.registration)


def _gate_metrics(registration: Mapping[str, Any]) -> dict[str, float]:
    if not registration:
        return {}
    tested = {} if registration["p_value"] is None else {names.GATE_P_VALUE: registration["p_value"]}
    return {names.PROMOTED: float(registration["verdict"] == Verdict.PROMOTED), **tested}


def tags(found: Results) -> dict[str, str]:
    """Which version the run made, and what the gate said."""
    if not found.registration:
        return {}
    registration = found.registration
    return {
        "model.name": registration["model"],
        "model.version": registration["version"],
        "model.aliases": ", ".join(registration["aliases"]) or "none",
        "candidate": registration["candidate"],
        "gate.reason": registration["reason"],
    }


def note(found: Results, runs: Mapping[str, str]) -> str:
    """Markdown for the description of the run: the verdict, the candidates, links to the runs of the stages."""
    lines = [found.registration["reason"], ""] if found.registration else []
    lines += ["| policy | success | 95 % interval | episodes |", "|---|---|---|---|"]
    for one in found.evaluation.get("candidates", []):
        overall = one["overall"]
        ends = interval(overall["low"], overall["high"])
        lines.append(f"| {one['label']} | {100 * overall['rate']:.1f} % | {ends} | {overall['episodes']} |")
    lines += ["", "Runs of the stages: " + ", ".join(f"[{stage}]({_page(run)})" for stage, run in runs.items())]
    return "\n".join(lines)


def _page(run: str) -> str:
    return f"{mlflow_pages()}/#/runs/{run}"


def read_json(path: Path) -> Mapping[str, Any]:
    """Empty if the file is missing or damaged."""
    try:
        content: Mapping[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content


def interval(low: float, high: float, sign: str = "-") -> str:
    """In percent; `sign` "+" writes a plus before positive ends.

    Example: interval(-0.05, 0.1, "+") == "-5.0 to +10.0"
    """
    return f"{100 * low:{sign}.1f} to {100 * high:{sign}.1f}"
