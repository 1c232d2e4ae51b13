"""`nightshift report`: the page of the last run, and of all nights."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from rich import filesize

from nightshift.adapters.dvc_store import DvcStore
from nightshift.cli.commands import enter
from nightshift.project import paths, repository
from nightshift.telemetry.console import console


def report() -> None:
    """Write the report of the last run again."""
    from nightshift.pipeline.report import words, writing

    root = enter()
    repository.check(root)
    facts = writing.write(root)
    with closing(DvcStore(root)) as store:
        store.track(paths.REPORT)
    console.print(words.verdict(facts), soft_wrap=True, markup=False)
    if facts.refusal and facts.best:
        console.print(f"Results from before: {words.outcome(facts)}", soft_wrap=True, markup=False)
    _say(root / paths.REPORT, paths.REPORT)


def all_nights() -> None:
    """Write the site of all nights."""
    from nightshift.pipeline.report import nights

    root = enter()
    repository.check(root)
    page = nights.write(root)
    _say(page, page.relative_to(root))


def _say(page: Path, name: Path) -> None:
    console.print(f"[cyan]{name}[/]  [dim]{filesize.decimal(page.stat().st_size)}[/]", soft_wrap=True)
