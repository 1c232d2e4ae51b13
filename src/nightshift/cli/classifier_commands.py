"""`nightshift classifier …`: what each command prints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from nightshift.cli.commands import enter
from nightshift.data import sources
from nightshift.pipeline.run import Session
from nightshift.project import paths
from nightshift.telemetry.console import console

if TYPE_CHECKING:
    from nightshift.pipeline import classifier


def record(policy: Path, episodes: int, temperature: float) -> None:
    """Episodes of a policy in data/rollouts."""
    from nightshift.pipeline import classifier

    with Session(enter(), kind="classifier") as session:
        found = classifier.record(session, policy, episodes, temperature)
    for task, (successes, count) in found.items():
        console.print(f"{task}: {successes} of {count} episodes succeeded")
    console.print(f"[bold]{paths.ROLLOUTS}[/]  to learn from them, write in params.yaml under classifier:")
    console.print(Text(f"  sources: [demos, {sources.ROLLOUTS}]", style="cyan"))


def train() -> None:
    """The classifier in models/classifier, with its threshold."""
    from nightshift.pipeline import classifier

    with Session(enter(), kind="classifier") as session:
        outcome = classifier.train(session)
    _show("calibration", outcome)
    console.print("look at its mistakes before you use it:")
    console.print(Text("  nightshift classifier evaluate", style="cyan"))
    console.print("to take rewards from it, write in params.yaml under rlpd:")
    console.print(Text(f"  reward: {outcome.name}", style="cyan"))
    console.print("to share it with every clone (dvc push, dvc pull):")
    console.print(Text(f"  git add {outcome.pointer}", style="cyan"))


def evaluate() -> None:
    """The confusion table and the contact sheet on episodes that the classifier has not seen."""
    from nightshift.pipeline import classifier
    from nightshift.reports.classifier import SHEET

    with Session(enter(), kind="classifier") as session:
        outcome = classifier.evaluate(session)
    _show("test", outcome)
    console.print(Text.assemble(("examples  ", "dim"), os.fspath(paths.CLASSIFIER_REPORT / SHEET)), soft_wrap=True)


def _show(part: str, outcome: classifier.Outcome) -> None:
    from nightshift.reports.classifier import words

    frames = ", ".join(f"{count} {name}" for name, count in outcome.frames.items())
    console.print(f"[bold]{outcome.name}[/]  threshold {outcome.threshold:.3f}  [dim]frames: {frames}[/]")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, title=f"{part} episodes", title_justify="left")
    for column in ("", "TP", "FN", "FP", "TN", "precision", "recall"):
        table.add_column(column)
    for name, one in outcome.tables.items():
        counts = (one.true_positives, one.false_negatives, one.false_positives, one.true_negatives)
        table.add_row(name, *map(str, counts), words(one.precision), words(one.recall))
    console.print(table)
