"""`nightshift robustness`: a policy under perturbations, alone or against another one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from nightshift import files
from nightshift.cli.commands import enter
from nightshift.cli.model_commands import new_table
from nightshift.errors import ConfigError, RobustnessFell
from nightshift.pipeline import results
from nightshift.project import packages, paths
from nightshift.reports.robustness import compared, limits
from nightshift.telemetry.console import console

TEMPLATES = "jinja2"
"""The package that writes pages."""
_UNLIMITED = 10_000
"""Columns, to measure what a table would take."""


def check_alone(option: str, others: Mapping[str, str | bool]) -> None:
    """ConfigError if any of the others is given: an option that plays nothing would ignore it."""
    ignored = " and ".join(name for name, given in others.items() if given)
    if ignored:
        raise ConfigError(f"{option} plays nothing, so it would ignore {ignored}", f"leave out {ignored}, or {option}")


def listing() -> None:
    """Every perturbation: what it does, where its name comes from, and whether the suite can do it."""
    from nightshift import config
    from nightshift.envs.perturbations import registry

    suite = config.load(enter() / paths.PARAMS).env.suite
    for name in registry.names():
        found = registry.find(name)
        can = f"{suite} can do it" if name in registry.of_suite(suite) else f"{suite} cannot do it"
        console.print(Text.assemble((name, "bold"), f"  {can}"))
        console.print(Text.assemble(f"  strength 1: {found.summary}", (f"  name: {found.source}", "dim")))


def evaluate(policy: str, against: str, *, retry_lost: bool = False) -> None:
    """Play what is missing of the grid, and show it."""
    from nightshift.pipeline import robustness

    root = enter()
    _show(root, robustness.evaluate(root, policy, against, retry_lost=retry_lost))


def page() -> None:
    """Show what was found before, here or on a compute node."""
    root = enter()
    files.verify_folder(root / paths.ROBUSTNESS, "nightshift robustness makes it; or bring it from the compute node")
    _show(root, json.loads((root / paths.ROBUSTNESS_REPORT).read_text()))


def _show(root: Path, found: Mapping[str, Any]) -> None:
    """As tables, and as a page. RobustnessFell if the first policy fell below the second."""
    for player in found["policies"]:
        _print_rates(found, player)
    for sentence in limits(found):
        console.print(sentence)
    if found["against"]:
        _print_comparison(found)
    _write_page(root, found)
    if found["against"] and found["against"]["fallen"]:
        raise _fell(found)


def _write_page(root: Path, found: Mapping[str, Any]) -> None:
    if not packages.is_installed(TEMPLATES):
        console.print(f"{paths.ROBUSTNESS_REPORT}; the page needs {TEMPLATES}: nightshift robustness --page makes it")
        return
    from nightshift.pipeline.report import robustness

    robustness.write(root, found)
    console.print(f"[cyan]{paths.ROBUSTNESS_PAGE}[/]", soft_wrap=True)


def _print_rates(found: Mapping[str, Any], player: Mapping[str, Any]) -> None:
    console.print(Text(player["name"], style="bold"), soft_wrap=True)
    for table in _tables_that_fit(found["strengths"], player):
        console.print(table)
    if player["invalid"]:
        console.print(f"{player['invalid']} episodes were lost to the simulator; – stands where none was valid")
        console.print("  → nightshift robustness --retry-lost plays them again")


def _tables_that_fit(strengths: Sequence[float], player: Mapping[str, Any]) -> list[Table]:
    """As few as the terminal has room for: in a table that is too wide, numbers are cut to other numbers."""
    unlimited = console.options.update(max_width=_UNLIMITED)
    for count in range(1, len(strengths) + 1):
        size = -(-len(strengths) // count)
        parts = [strengths[first : first + size] for first in range(0, len(strengths), size)]
        tables = [_rates(part, player, with_lowest=part is parts[-1]) for part in parts]
        if all(console.measure(table, options=unlimited).maximum <= console.width for table in tables):
            break
    return tables


def _rates(strengths: Sequence[float], player: Mapping[str, Any], *, with_lowest: bool) -> Table:
    """Success by perturbation and strength, and on request the interval where it is lowest of all strengths."""
    table = new_table("perturbation", *(f"{strength:g}" for strength in strengths))
    if with_lowest:
        table.add_column("lowest, 95 % interval", no_wrap=True)
        table.add_row("unperturbed", *[""] * len(strengths), _with_interval(player["unperturbed"]["overall"]))
    for name, cells in player["perturbations"].items():
        rates = {cell["strength"]: cell["overall"] for cell in cells}
        lowest = min((rate for rate in rates.values() if rate["episodes"]), key=lambda rate: rate["rate"])
        known = {strength: f"{100 * rate['rate']:.0f}" if rate["episodes"] else "–" for strength, rate in rates.items()}
        shown = [known.get(strength, "") for strength in strengths]
        table.add_row(name, *shown, *([_with_interval(lowest)] if with_lowest else []))
    return table


def _with_interval(rate: Mapping[str, Any]) -> str:
    return f"{100 * rate['rate']:.1f} %  ({results.interval(rate['low'], rate['high'])})"


def _print_comparison(found: Mapping[str, Any]) -> None:
    ours, theirs = (player["name"] for player in found["policies"])
    table = new_table("same episodes", "episodes", "won", "lost", "points", "95 % interval", "")
    for name, row in compared(found).items():
        pair = row["overall"]
        counts = (str(pair["states"]), str(pair["won"]), str(pair["lost"]))
        interval = results.interval(pair["low"], pair["high"], sign="+")
        mark = "fell" if name in found["against"]["fallen"] else ""
        table.add_row(name, *counts, f"{100 * pair['gain']:+.1f}", interval, mark)
    console.print(Text(f"{ours} against {theirs}", style="bold"))
    console.print(table)


def _fell(found: Mapping[str, Any]) -> RobustnessFell:
    ours, theirs = (player["name"] for player in found["policies"])
    words = ", ".join(f"{100 * drop:.1f} points under {name}" for name, drop in found["against"]["fallen"].items())
    return RobustnessFell(
        f"{ours} is lower than {theirs} by {words}; the margin is {100 * found['against']['margin']:g}",
        "keep the other one as champion, or train with env.randomisation; register.max_perturbation_drop is the margin",
    )
