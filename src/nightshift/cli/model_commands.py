"""The commands on models and runs: what there is, what it was made of, which is better, and moving the champion."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from nightshift import config, files
from nightshift.cli.commands import enter
from nightshift.config import CHAMPION
from nightshift.errors import DataError, NightshiftError, ProjectError
from nightshift.pipeline import results
from nightshift.project import paths, versions
from nightshift.telemetry.console import console

if TYPE_CHECKING:
    from nightshift.adapters.model_versions import Version
    from nightshift.statistics.intervals import Rate

ALIASES = {CHAMPION: "black on yellow", "challenger": "black on cyan"}
"""With the style each is shown in."""
MAIN_PARAMS = ("env.suite", "policy.family", "algorithms", "start", "seed")
"""That say what kind of training made a version."""
SHORT_ID = 8
"""Characters of a run's id that tables show."""


def models() -> None:
    """Every version, the champion marked, with its result and the gate's reason below."""
    from nightshift.adapters import model_versions

    root = enter()
    name = model_name(root)
    found = model_versions.versions(root, name)
    if not found:
        raise ProjectError(f"MLflow has no model {name!r} yet", "nightshift run")
    table = new_table("", "version", "made by", "success", "95 % interval", "states", "date", "")
    for version in found:
        mark = "★" if version.is_champion else ""
        table.add_row(mark, version.version, version.candidate, *result_cells(version.result), *_when(version))
    console.print(Text(name, style="bold"))
    console.print(table)
    for version in found:
        words = version.reason + (f"; rolled back on {version.withdrawn}" if version.withdrawn else "")
        console.print(Text(words or f"version {version.version}: no reason on record", style="dim"))
    if not any(version.is_champion for version in found):
        console.print("no version is champion", style="yellow")


def promote(which: str) -> None:
    """A version becomes champion because a person says so."""
    from nightshift.adapters import model_versions

    root = enter()
    name = model_name(root)
    before, now = model_versions.promote(root, name, which)
    if before == now:
        console.print(f"version {now} of {name} is champion already", markup=False)
    else:
        after = f" in place of version {before}" if before else ""
        console.print(f"version {now} of {name} is champion now{after}", markup=False)


def rollback() -> None:
    """The champion before this one is champion again."""
    from nightshift.adapters import model_versions

    root = enter()
    name = model_name(root)
    withdrawn, now = model_versions.rollback(root, name)
    console.print(
        f"version {now} of {name} is champion again; version {withdrawn} was rolled back, and the gate will not "
        f"bring it back: nightshift promote {withdrawn} would",
        markup=False,
    )


def lineage(what: str) -> None:
    """What a version was made of, and of what the versions were made that it started from."""
    from nightshift.adapters import model_versions

    root = enter()
    named, which = split_name(what, "")
    name = named or model_name(root)
    version = model_versions.find(root, name, which)
    _print_lineage(root, version)
    known = {version.version}
    while version.started_from and version.started_from not in known:
        known.add(version.started_from)
        parent = model_versions.find(root, name, version.started_from)
        changed = model_versions.changed_params(root, version, since=parent)
        console.print(Text(f"\nparams changed since it: {', '.join(changed) or 'none'}", style="dim"))
        version = parent
        _print_lineage(root, version)


def runs(limit: int) -> None:
    """The newest runs of the pipeline: result, version, and what was changed."""
    from nightshift.adapters import model_versions

    found = model_versions.runs(enter(), limit)
    if not found:
        raise ProjectError("MLflow has no run of the pipeline yet", "nightshift run")
    table = new_table("run", "started", "", "success", "95 % interval", "version")
    for run in found:
        rate = "" if run.success is None else f"{100 * run.success:.1f} %"
        interval = "" if run.low is None or run.high is None else results.interval(run.low, run.high)
        version = f"{run.version}{' ★' if run.promoted else ''}"
        table.add_row(run.run_id[:SHORT_ID], f"{run.started:%Y-%m-%d %H:%M}", run.status, rate, interval, version)
    console.print(table)
    for run in found:
        if run.changed:
            console.print(Text(f"{run.run_id[:SHORT_ID]}  {run.changed}", style="dim"))


def reproduce(prefix: str, to: Path | None) -> None:
    """A checkout of a run's commit with its params and data in a folder of its own, and how to run it."""
    from nightshift.adapters import model_versions
    from nightshift.pipeline import reproduce as reproducing

    start = Path.cwd()
    root = enter()
    run = model_versions.find_run(root, prefix)
    folder = (start / to) if to else root.parent / f"{root.name}-{run.run_id[:SHORT_ID]}"
    for sentence in reproducing.check_out(root, run, folder):
        console.print(sentence, markup=False, soft_wrap=True)


def export_policy(which: str, to: Path, base: Path | None, adapter: Path | None = None) -> None:
    """A policy as a published checkpoint, for programs that read those."""
    from nightshift.pipeline import robustness
    from nightshift.policies import publishing

    start = Path.cwd()
    root = enter()
    folder = start / to
    if folder.exists():
        raise DataError(f"{folder} already exists", "name a new folder")
    policy = robustness.find(root, config.load(root / paths.PARAMS), which).policy
    source = publishing.base_of(policy, base and start / base, adapter and start / adapter)
    if policy.spec.get("base") is None and adapter is None:
        console.print(
            f"{which} does not say what it began with: it is written as if no published adapter had been merged into "
            f"{source['path']}; name one by --adapter FOLDER",
            markup=False,
            soft_wrap=True,
        )
    with files.new_folder(folder) as new:
        publishing.publish(policy, source, new)
    console.print(f"{folder}: the weights of {which} as those of {source['path']}", markup=False, soft_wrap=True)


def sweep(choices: Sequence[str], sample: int, jobs: int) -> None:
    """Trials with other numbers, in clones of the project, best first."""
    from nightshift.adapters import mlflow_tracking
    from nightshift.pipeline import sweep as sweeping

    root = enter()
    seed = config.load(root / paths.PARAMS).seed
    chosen = sweeping.trials(root, sweeping.parse(choices), sample, seed)
    at_once = f", {jobs} at a time" if jobs else ""
    console.print(f"{len(chosen)} trials in {paths.SWEEPS}{at_once}", markup=False)
    if sentence := sweeping.uncommitted(root):
        console.print(sentence, markup=False, soft_wrap=True)
    mlflow_tracking.prepare(root)
    outcomes = []
    with contextlib.closing(sweeping.run(root, chosen, jobs)) as ended:
        for outcome in ended:
            console.print(f"{outcome.trial.title}: {outcome.error or result_cells(outcome.success)[0]}", markup=False)
            outcomes.append(outcome)
    table = new_table("trial", "success", "95 % interval", "states", "run", "params")
    for outcome in sorted(outcomes, key=lambda one: one.success.rate if one.success else -1, reverse=True):
        params = Text(outcome.trial.title, overflow="fold")
        table.add_row(str(outcome.trial.number), *result_cells(outcome.success), outcome.run_id[:SHORT_ID], params)
    table.columns[-1].no_wrap = False
    console.print(table)
    if failed := sum(outcome.success is None for outcome in outcomes):
        raise ProjectError(
            f"{failed} of {len(outcomes)} trials failed",
            f"their logs are beside the clones in {paths.SWEEPS}; the same command keeps the trials that are done",
        )


def split_name(what: str, model: str) -> tuple[str, str]:
    """MODEL@ALIAS, MODEL/VERSION, MODEL (its champion), or an alias or version of the model of params.yaml."""
    for separator in "@/":
        if separator in what:
            name, _, which = what.partition(separator)
            return name or model, which
    return (model, what) if what.isdigit() or what in ALIASES else (what, CHAMPION)


def model_name(root: Path) -> str:
    name: str = config.load(root / paths.PARAMS).section("register").model
    return name


def new_table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True, justify="right" if column in ("success", "states") else "left")
    return table


def result_cells(rate: Rate | None) -> tuple[str, str, str]:
    if rate is None:
        return ("", "", "")
    return (f"{100 * rate.rate:.1f} %", results.interval(rate.low, rate.high), f"{rate.successes}/{rate.episodes}")


def _when(version: Version) -> tuple[str, Text]:
    aliases = Text()
    for alias in version.aliases:
        aliases.append(alias, style=ALIASES.get(alias, ""))
        aliases.append(" ")
    if version.withdrawn:
        aliases.append("rolled back", style="dim")
    return (f"{version.created:%Y-%m-%d}", aliases)


def _print_lineage(root: Path, version: Version) -> None:
    names = f" ({', '.join(version.aliases)})" if version.aliases else ""
    console.print(Text(f"{version.model} version {version.version}{names}", style="bold"))
    revision = next((v.revision for v in versions.versions(root, paths.DATASET) if v.md5 == version.dataset), "")
    rate = result_cells(version.result)
    started = f"version {version.started_from}" if version.started_from else "scratch"
    rows = {
        "made by": f"{version.candidate} on {version.created:%Y-%m-%d %H:%M}",
        "success": f"{rate[0]} ({rate[1]}), {rate[2]} states" if version.result else "not evaluated",
        "dataset": f"{version.dataset}, {version.episodes or 'unknown'} episodes",
        "": f"in git: {revision}" if revision else "in no git revision: nightly.commit, or commit dvc.lock",
        "code": version.commit + (" (with changes that were not committed)" if version.commit.endswith("+") else ""),
        **({"policy": f"of the package {version.policy_package}"} if version.policy_package else {}),
        **_params_rows(root, version),
        "run": version.pipeline_run or "unknown",
        "started from": started,
        "weights": f"sha256 {version.weights[:16]}",
        "gate": version.reason,
    }
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, Text(value))
    console.print(table)


def _params_rows(root: Path, version: Version) -> dict[str, str]:
    """Its main params, and how the others differ from params.yaml as it is now: with that file they are all of them."""
    from nightshift.adapters import model_versions

    params = model_versions.params_of(root, version)
    if not params:
        return {"params": "unknown: its run is gone"}
    return {
        "params": ", ".join(f"{name} {params[name]}" for name in MAIN_PARAMS if name in params),
        "params.yaml": _since(root, params),
    }


def _since(root: Path, params: Mapping[str, str]) -> str:
    """How params.yaml differs now from these; a parameter that was added since is no difference."""
    from nightshift.adapters.tracking import WITHOUT_EFFECT, by_name, changes

    try:
        now = by_name(config.load(root / paths.PARAMS))
    except NightshiftError as error:
        return f"cannot be compared: {error.what}"
    changed = [f"{name} {then} (now {new})" for name, then, new in changes(params, now) if name in params]
    same = f"is the same now but for {', '.join(changed)}" if changed else "is the same now"
    *first, last = WITHOUT_EFFECT
    return f"{same} ({', '.join(first)} and {last} are not compared)"
