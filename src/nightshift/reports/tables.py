"""An evaluation as flat files: what `dvc metrics` and `dvc plots` show and compare between revisions."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nightshift.reports.candidates import Candidate
from nightshift.reports.history import KL, SAMPLED_SUCCESS, History


def metrics(report: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """By candidate: success and its interval, the gain over the first candidate, success by suite and by task."""
    return {result["name"]: _figures(result) for result in report["candidates"]}


def _figures(result: Mapping[str, Any]) -> dict[str, Any]:
    overall, gain = result["overall"], result["gain"]
    figures = {"success": overall["rate"], "low": overall["low"], "high": overall["high"]}
    if gain:
        figures |= {"gain": gain["gain"], "p_value": gain["p_value"]}
    by_suite = {"suite": {suite: rate["rate"] for suite, rate in suites(result).items()}} if suites(result) else {}
    return figures | by_suite | {"task": {task: rate["rate"] for task, rate in result["tasks"].items()}}


def suites(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rates by published suite, where a candidate played several of them."""
    found: Mapping[str, Any] = result.get("suites", {})  # reports had none
    return found


def same_policy_as(result: Mapping[str, Any]) -> str | None:
    """The name of the policy that played in its place, since the two are the same."""
    found: str | None = result.get("same_policy_as")  # reports had none
    return found


def compared(candidates: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that are another policy than the first, so that their gain over it is a measurement."""
    return [other for other in candidates[1:] if same_policy_as(other) != candidates[0]["name"]]


def parts(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rates by suite where a candidate played several: tasks are too many to show then. By task otherwise."""
    return suites(result) or result["tasks"]


def success(report: Mapping[str, Any]) -> str:
    """CSV: success of every candidate on every task."""
    rows = [
        (f"{task}, {result['name']}", rate["rate"])
        for result in report["candidates"]
        for task, rate in {"overall": result["overall"], **suites(result), **result["tasks"]}.items()
    ]
    return _csv(("policy", "success"), rows)


def learning(candidates: Sequence[Candidate]) -> str:
    """CSV: sampled and greedy success and KL by iteration, of the last candidate that has a history."""
    histories = [candidate.history for candidate in candidates if candidate.history]
    return _csv(("iteration", "sampled", "greedy", "kl"), _iterations(histories[-1]) if histories else ())


def _iterations(history: History) -> list[tuple[object, ...]]:
    sampled, kl = history.metric(SAMPLED_SUCCESS), history.metric(KL)
    greedy = {iteration: rate.rate for iteration, rate in history.validation.items()}
    return [
        (iteration, *(values.get(iteration, "") for values in (sampled, greedy, kl)))
        for iteration in sorted({*sampled, *greedy})
    ]


def _csv(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    return text.getvalue()
