"""What came out of a pipeline, for the terminal and for Prefect's page.

Not in reports/, which `evaluate` depends on: a better table must not make an evaluation stale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from nightshift.config import CHAMPION
from nightshift.pipeline import results as pipeline_results
from nightshift.pipeline.run import StageResult, timings
from nightshift.project import paths
from nightshift.project.environment import mlflow_pages
from nightshift.reports import tables

MARKS = {
    "ran": ("● ran", "bold green"),
    "cached": ("○ cached", "dim"),
    "restored": ("◐ restored", "cyan"),
    "skipped": ("– skipped", "dim"),
}
BIN = ".venv/bin/nightshift"
_BAR = 16
_MINUTE, _HOUR = 60, 3600
_WIDTH = 96


@dataclass(frozen=True, kw_only=True)
class Summary:
    results: Sequence[StageResult]
    took: Mapping[str, float]
    """Seconds of each stage when it last really ran."""
    evaluation: Mapping[str, Any]
    receipt: Mapping[str, Any]
    seconds: float


def gather(root: Path, results: Sequence[StageResult], seconds: float | None = None) -> Summary:
    found = pipeline_results.read(root)
    return Summary(
        results=results,
        took=timings(root),
        evaluation=found.evaluation,
        receipt=found.registration,
        seconds=sum(result.seconds for result in results) if seconds is None else seconds,
    )


def render(summary: Summary) -> RenderableType:
    """For a terminal of 80 columns or more."""
    parts: list[RenderableType] = [_stages(summary)]
    if summary.evaluation:
        parts += [Text(), _success(summary.evaluation)]
        if compared := tables.compared(summary.evaluation["candidates"]):
            parts += [Text(), _gains(summary.evaluation["candidates"][0], compared)]
        parts += [Text(line, style="dim") for line in _not_played(summary.evaluation)]
        parts += [Text(line, style="yellow") for line in _left_out(summary.evaluation)]
    if summary.receipt:
        parts += [Text(), _model(summary.receipt)]
    parts += [Text(), _next_steps(summary)]
    title = f"[bold]Nightshift[/]  [dim]{clock(summary.seconds)} in all[/]"
    return Panel(Group(*parts), title=title, title_align="left", border_style="blue", padding=(1, 2), width=_WIDTH)


def markdown(summary: Summary) -> str:
    lines = ["| stage | | seconds |", "|---|---|---|"]
    lines += [f"| {r.stage} | {r.status} | {r.seconds:.1f} |" for r in summary.results]
    lines += ["", "| policy | task | success | 95 % interval | episodes |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['policy']} | {row['task']} | {row['success']} | {row['interval']} | {row['episodes']} |"
        for row in _rows(summary.evaluation)
    ]
    lines += [f"\n{line}" for line in _sentences(summary.evaluation)]
    if receipt := summary.receipt:
        names = ", ".join(receipt["aliases"])
        lines += ["", f"**{receipt['model']}** version {receipt['version']} ({names}): {receipt['reason']}"]
    return "\n".join(lines)


def success_rows(root: Path) -> list[dict[str, str]]:
    """A row per candidate and task, the overall figure first."""
    return _rows(pipeline_results.read(root).evaluation)


def model_page(root: Path) -> str:
    """Where `nightshift ui` shows the registered version; empty if there is none."""
    receipt = pipeline_results.read(root).registration
    return f"{mlflow_pages()}/#/models/{receipt['model']}/versions/{receipt['version']}" if receipt else ""


def decision(root: Path) -> str:
    """Why the registered version is champion or not; empty if there is none."""
    return str(pipeline_results.read(root).registration.get("reason", ""))


def clock(seconds: float) -> str:
    """Example: clock(187) == "3 min 07 s" """
    if round(seconds, 1) < _MINUTE:
        return f"{seconds:.1f} s"
    if round(seconds) < _HOUR:
        return "{} min {:02d} s".format(*divmod(round(seconds), _MINUTE))
    return "{} h {:02d} min".format(*divmod(round(seconds / _MINUTE), _MINUTE))


def p_value(value: float) -> str:
    """Example: p_value(0.0412) == "0.041" """
    return "< 0.001" if value < 0.001 else f"{value:.3f}"  # noqa: PLR2004


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, expand=True)


def _stages(summary: Summary) -> Table:
    table = _table()
    table.add_column("stage", style="bold", width=10)
    table.add_column("", width=11)
    table.add_column("time", justify="right", width=13)
    table.add_column("why", style="dim", ratio=1, overflow="fold")
    for result in summary.results:
        label, style = MARKS[result.status]
        why = "; ".join(result.reasons)
        if result.status in ("cached", "restored") and result.stage in summary.took:
            why = f"took {clock(summary.took[result.stage])} when it ran"
        table.add_row(result.stage, Text(label, style=style), clock(result.seconds), why)
    return table


def _success(evaluation: Mapping[str, Any]) -> Table:
    table = _table()
    table.add_column("held-out success", style="bold", ratio=1, overflow="fold")
    table.add_column("", width=_BAR)
    table.add_column("rate", justify="right", width=7)
    table.add_column("95 % interval", justify="right", width=13)
    table.add_column("episodes", justify="right", width=8)
    for result in _played(evaluation):
        overall = result["overall"]
        table.add_row(_title(result), _bar(overall), f"[bold]{_rate(overall)}[/]", _interval(overall), _counts(overall))
        shown = tables.parts(result)
        for part, figures in shown.items() if len(shown) > 1 else ():
            bar = _bar(figures, dim=True)
            table.add_row(f"  {part}", bar, _rate(figures), _interval(figures), _counts(figures), style="dim")
    return table


def _gains(first: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> Table:
    """State by state against the first candidate, where both were valid."""
    table = _table()
    table.add_column(f"gain over {first['label']}", style="bold", ratio=1, overflow="fold")
    table.add_column("states", justify="right", width=6)
    table.add_column("won", justify="right", width=4)
    table.add_column("lost", justify="right", width=4)
    table.add_column("points", justify="right", width=6)
    table.add_column("95 % interval", justify="right", width=16)
    table.add_column("exact p", justify="right", width=8)
    for result in others:
        gain = result["gain"]
        counts = [str(gain[key]) for key in ("states", "won", "lost")]
        points = f"[bold]{100 * gain['gain']:+.1f}[/]"
        table.add_row(_title(result), *counts, points, _interval(gain, sign="+"), p_value(gain["p_value"]))
    return table


def _sentences(evaluation: Mapping[str, Any]) -> list[str]:
    """The gains in words, what did not play, and what was left out."""
    candidates = evaluation.get("candidates", [])
    gains = [
        f"{_title(result)}: {100 * gain['gain']:+.1f} points over {candidates[0]['label']} "
        f"(95 % interval {_interval(gain, sign='+')}, exact p {p_value(gain['p_value'])}), "
        f"won {gain['won']} and lost {gain['lost']} of {gain['states']} states"
        for result in tables.compared(candidates)
        for gain in [result["gain"]]
    ]
    return [*gains, *_not_played(evaluation), *_left_out(evaluation)]


def _not_played(evaluation: Mapping[str, Any]) -> list[str]:
    """A line per policy whose figures are those of another one."""
    titles = {result["name"]: _title(result) for result in _played(evaluation)}
    return [
        f"{titles[result['name']]}: the same policy as {titles[first]}, not played again"
        for result in _played(evaluation)
        if (first := tables.same_policy_as(result))
    ]


def _left_out(evaluation: Mapping[str, Any]) -> list[str]:
    """A line per candidate whose figures are not of the whole grid."""
    return [
        f"{_title(result)}: without {result['invalid']} episodes in which the simulator failed"
        for result in _played(evaluation)
        if result["invalid"]
    ]


def _played(evaluation: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Every policy with figures on the grid: the candidates, and the champion where it had to play."""
    champion = evaluation.get(CHAMPION)
    return [*evaluation.get("candidates", []), *([champion] if champion else [])]


def _title(result: Mapping[str, Any]) -> str:
    return f"after {result['label']}" if "label" in result else f"champion, version {result['version']}"


def _bar(figures: Mapping[str, float], *, dim: bool = False) -> Text:
    """The rate as a bar, its interval as a lighter end."""
    low, rate, high = (round(figures[key] * _BAR) for key in ("low", "rate", "high"))
    text = Text("█" * low + "▓" * (rate - low), style="dim green" if dim else "green")
    text.append("░" * (high - rate), style="dim green")
    text.append("·" * (_BAR - max(high, rate)), style="dim")
    return text


def _model(receipt: Mapping[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    text = Text.assemble((f"{receipt['model']}", "bold"), f" version {receipt['version']} ")
    for alias in receipt["aliases"]:
        text.append(" ")
        text.append(f" {alias} ", style="black on yellow" if alias == "champion" else "black on cyan")
    table.add_row("model", text)
    table.add_row("gate", Text(receipt["reason"], style="dim"))
    return table


def _next_steps(summary: Summary) -> Table:
    table = Table.grid(padding=(0, 2))
    model = "champion" if "champion" in summary.receipt.get("aliases", ()) else "challenger"
    steps = {
        "make ui": "runs and models in MLflow",
        f"{BIN} predict --model {model}": "load it and let it act",
        f"{BIN} dataset ls": "versions of the dataset",
        str(paths.REPORT): "the report: results, curves, films",
    }
    for command, words in steps.items():
        table.add_row(Text(command, style="cyan"), Text(words, style="dim"))
    return table


def _rows(evaluation: Mapping[str, Any]) -> list[dict[str, str]]:
    return [
        {
            "policy": _title(result),
            "task": task,
            "success": _rate(figures),
            "interval": _interval(figures),
            "episodes": str(figures["episodes"]),
        }
        for result in _played(evaluation)
        for task, figures in {"all": result["overall"], **tables.suites(result), **result["tasks"]}.items()
    ]


def _rate(figures: Mapping[str, float]) -> str:
    return f"{100 * figures['rate']:.1f} %"


def _counts(figures: Mapping[str, int]) -> str:
    return f"{figures['successes']}/{figures['episodes']}"


def _interval(figures: Mapping[str, float], sign: str = "-") -> str:
    return pipeline_results.interval(figures["low"], figures["high"], sign)
