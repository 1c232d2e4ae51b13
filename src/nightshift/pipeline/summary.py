"""What came out of a pipeline, for the terminal and for Prefect's page.

Not in reports/, which `evaluate` depends on: a better table must not make an evaluation stale.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from nightshift.pipeline.run import StageResult, timings
from nightshift.project import paths
from nightshift.project.environment import MLFLOW_PAGES

NAMES = {"sft": "after SFT", "rloo": "after RL (RLOO)"}
MARKS = {"ran": ("● ran", "bold green"), "cached": ("○ cached", "dim"), "restored": ("◐ restored", "cyan")}
BIN = ".venv/bin/nightshift"
_BAR = 20


@dataclass(frozen=True, kw_only=True)
class Summary:
    results: Sequence[StageResult]
    took: Mapping[str, float]
    """Seconds of each stage when it last really ran."""
    evaluation: Mapping[str, Any]
    receipt: Mapping[str, Any]
    seconds: float


def gather(root: Path, results: Sequence[StageResult], seconds: float | None = None) -> Summary:
    return Summary(
        results=results,
        took=timings(root),
        evaluation=_read(root / paths.EVALUATION_REPORT),
        receipt=_read(root / paths.RECEIPT),
        seconds=sum(result.seconds for result in results) if seconds is None else seconds,
    )


def render(summary: Summary) -> RenderableType:
    """For a terminal of 100 columns or less."""
    parts: list[RenderableType] = [_stages(summary)]
    if summary.evaluation:
        parts += [Text(), _success(summary.evaluation)]
        parts += [Text(line, style="yellow") for line in _left_out(summary.evaluation)]
    if summary.receipt:
        parts += [Text(), _model(summary.receipt)]
    parts += [Text(), _next_steps(summary)]
    title = f"[bold]Nightshift[/]  [dim]{clock(summary.seconds)} in all[/]"
    return Panel(Group(*parts), title=title, title_align="left", border_style="blue", padding=(1, 2), width=96)


def markdown(summary: Summary) -> str:
    lines = ["| stage | | seconds |", "|---|---|---|"]
    lines += [f"| {r.stage} | {r.status} | {r.seconds:.1f} |" for r in summary.results]
    lines += ["", "| policy | task | success | 95 % interval | episodes |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['policy']} | {row['task']} | {row['success']} | {row['interval']} | {row['episodes']} |"
        for row in _rows(summary.evaluation)
    ]
    lines += [f"\n{line}" for line in _left_out(summary.evaluation)]
    if receipt := summary.receipt:
        names = ", ".join(receipt["aliases"])
        lines += ["", f"**{receipt['model']}** version {receipt['version']} ({names}); champion: {receipt['why']}"]
    return "\n".join(lines)


def success_rows(root: Path) -> list[dict[str, str]]:
    """A row per policy and task, the overall figure first."""
    return _rows(_read(root / paths.EVALUATION_REPORT))


def model_page(root: Path) -> str:
    """Where `nightshift ui` shows the registered version; empty if there is none."""
    receipt = _read(root / paths.RECEIPT)
    return f"{MLFLOW_PAGES}/#/models/{receipt['model']}/versions/{receipt['version']}" if receipt else ""


def clock(seconds: float) -> str:
    """Example: clock(187) == "3 min 07 s" """
    if seconds < 60:  # noqa: PLR2004
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def _stages(summary: Summary) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, expand=True)
    table.add_column("stage", style="bold", width=10)
    table.add_column("", width=11)
    table.add_column("time", justify="right", width=13)
    table.add_column("why", style="dim", ratio=1, overflow="ellipsis", no_wrap=True)
    for result in summary.results:
        label, style = MARKS[result.status]
        why = "; ".join(result.reasons)
        if result.status != "ran" and result.stage in summary.took:
            why = f"took {clock(summary.took[result.stage])} when it ran"
        table.add_row(result.stage, Text(label, style=style), clock(result.seconds), why)
    return table


def _success(evaluation: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, expand=True)
    table.add_column("held-out success", style="bold", ratio=1, no_wrap=True)
    table.add_column("", width=_BAR)
    table.add_column("rate", justify="right", width=7)
    table.add_column("95 % interval", justify="right", width=15)
    table.add_column("episodes", justify="right", width=9)
    for name, result in _policies(evaluation):
        overall = result["overall"]
        rate, interval = _rate(overall), _interval(overall)
        counts = f"{overall['successes']}/{overall['episodes']}"
        table.add_row(NAMES.get(name, name), _bar(overall), f"[bold]{rate}[/]", interval, counts)
        for task, figures in result["tasks"].items() if len(result["tasks"]) > 1 else ():
            counts = f"{figures['successes']}/{figures['episodes']}"
            table.add_row(
                f"[dim]  {task}[/]", _bar(figures, dim=True), _rate(figures), _interval(figures), counts, style="dim"
            )
    return table


def _left_out(evaluation: Mapping[str, Any]) -> list[str]:
    """A line per policy whose figures are not of the whole grid."""
    return [
        f"{NAMES.get(name, name)}: without {result['invalid']} episodes in which the simulator failed"
        for name, result in _policies(evaluation)
        if result["invalid"]
    ]


def _bar(figures: Mapping[str, float], *, dim: bool = False) -> Text:
    """The rate as a bar, its interval as a lighter end."""
    low, rate, high = (round(figures[key] * _BAR) for key in ("low", "rate", "high"))
    text = Text("█" * low + "▓" * (rate - low), style="dim green" if dim else "green")
    text.append("░" * (high - rate), style="dim green")
    text.append("·" * (_BAR - max(high, rate)), style="dim")
    return text


def _model(receipt: Mapping[str, Any]) -> Text:
    text = Text.assemble("model    ", (f"{receipt['model']}", "bold"), f" version {receipt['version']}  ")
    for alias in receipt["aliases"]:
        text.append(f" {alias} ", style="black on yellow" if alias == "champion" else "black on cyan")
        text.append(" ")
    text.append(f"\nchampion {receipt['why']}", style="dim")
    return text


def _next_steps(summary: Summary) -> Table:
    table = Table.grid(padding=(0, 2))
    model = "champion" if "champion" in summary.receipt.get("aliases", ()) else "challenger"
    steps = {
        "make ui": "curves, lineage and the model in MLflow",
        f"{BIN} predict --model {model}": "load it back and let it act",
        f"{BIN} dataset ls": "the versions of the dataset",
        str(paths.EVALUATION): "plot, films and numbers",
    }
    for command, words in steps.items():
        table.add_row(Text(command, style="cyan"), Text(words, style="dim"))
    return table


def _rows(evaluation: Mapping[str, Any]) -> list[dict[str, str]]:
    return [
        {
            "policy": NAMES.get(policy, policy),
            "task": task,
            "success": _rate(figures),
            "interval": _interval(figures),
            "episodes": str(figures["episodes"]),
        }
        for policy, result in _policies(evaluation)
        for task, figures in {"all": result["overall"], **result["tasks"]}.items()
    ]


def _policies(evaluation: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """In the order they came to be."""
    order = list(NAMES)
    found = evaluation.get("policies", {})
    return sorted(found.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order))


def _rate(figures: Mapping[str, float]) -> str:
    return f"{100 * figures['rate']:.1f} %"


def _interval(figures: Mapping[str, float]) -> str:
    return f"{100 * figures['low']:.1f} – {100 * figures['high']:.1f}"


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content: Mapping[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return content
