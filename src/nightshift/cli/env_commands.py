"""What `nightshift env …` does: which tasks there are, what one of them is, and whether they run here."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from nightshift import config, envs
from nightshift.cli.commands import enter
from nightshift.envs import protocols
from nightshift.envs.base import CAMERAS
from nightshift.errors import NightshiftError, ProjectError, SimulatorError, StatesNotDrawn
from nightshift.project import paths
from nightshift.telemetry.console import console
from nightshift.types import Task

GOALS = {
    "on": "{} on {}",
    "in": "{} in {}",
    "up": "{} lifted",
    "open": "{} open",
    "close": "{} closed",
    "turnon": "{} turned on",
    "turnoff": "{} turned off",
}
"""LIBERO's predicates as words."""

REQUIREMENTS = Path("requirements-simulator.txt")
INSTALL = f"pip install --no-deps -r {REQUIREMENTS}"

Verdict = Literal["good", "note", "missing"]
MARKS: dict[Verdict, tuple[str, str]] = {"good": ("✔", "green"), "note": ("•", "yellow"), "missing": ("✘", "bold red")}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of `env check`. Only what is "missing" keeps the suite of params.yaml from running."""

    about: str
    found: str
    verdict: Verdict = "good"
    remedy: str = ""


def list_tasks(suite: str) -> None:
    """Every suite, or one, with its tasks."""
    from nightshift.envs.suites import MINI, SUITES, suite_tasks

    enter()
    missing = _missing_assets()
    for name in [suite] if suite else SUITES:
        tasks = suite_tasks(name)
        there = "built in" if name == MINI else "[red]assets missing[/]" if missing else "assets there"
        console.print(f"[bold]{name}[/]  [dim]{len(tasks)} tasks, {there}[/]")
        _print_tasks(tasks)
    if missing and suite != MINI:
        console.print("[dim]nightshift env check says how to get LIBERO's assets[/]")


def show(name: str, suite: str) -> None:
    """One task, with a picture where one can be drawn."""
    from nightshift.envs.suites import load_goal

    root = enter()
    chosen = config.load(root / paths.PARAMS).env
    task = _find(name, suite)
    console.print(f"[bold]{task.name}[/]\n[dim]task {task.index} of {task.suite}, which has {task.suite_size}[/]\n")
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("instruction", Text(task.language))
    table.add_row("goal", Text("\nand ".join(in_words(predicate) for predicate in load_goal(task))))
    table.add_row("init states", Text(f"{envs.init_state_count(task, 'eval')} for evaluation\n{_training(task)}"))
    table.add_row("steps", _steps(task, chosen))
    console.print(table)
    console.print(Text.assemble(("\npicture", "bold"), "      ", _picture(task, chosen.protocol)), soft_wrap=True)


def check() -> None:
    """Everything that simulating stands on; SimulatorError if the suite of params.yaml cannot run."""
    root = enter()
    params = config.load(root / paths.PARAMS)
    findings = list(_findings(params))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, show_header=False)
    for finding in findings:
        mark, style = MARKS[finding.verdict]
        table.add_row(Text(mark, style=style), Text(finding.about, style="bold"), Text(finding.found, overflow="fold"))
    console.print(table)
    for finding in findings:
        if finding.remedy:
            console.print(Text(f"{finding.about}: {finding.remedy}", style="dim"), soft_wrap=True)
    lacking = [finding.about for finding in findings if finding.verdict == "missing"]
    if lacking:
        raise SimulatorError(
            f"{params.env.suite}, which params.yaml selects, cannot run here: {', '.join(lacking)}",
            "do what is said above, then nightshift env check",
        )
    console.print(f"\n[green]{params.env.suite}[/], which params.yaml selects, can run here")


def in_words(predicate: tuple[str, ...]) -> str:
    """("on", "cube_1", "plate_1") as "cube_1 on plate_1"."""
    name, *things = predicate
    return GOALS[name].format(*things) if name in GOALS else f"{name}({', '.join(things)})"


def _print_tasks(tasks: list[Task]) -> None:
    """A line for each where the longest fits the terminal, else the instruction on a line of its own."""
    widest = max(len(task.name) for task in tasks)
    one_line = widest + max(len(task.language) for task in tasks) + 8 <= console.width
    for task in tasks:
        name = f"{task.index:>4}  {task.name:<{widest}}" if one_line else f"{task.index:>4}  {task.name}\n     "
        console.print(Text.assemble(name, "  " if one_line else " ", (task.language, "dim")), soft_wrap=True)


def _find(name: str, suite: str) -> Task:
    """The task of that name; the suites share no names today, but nothing forbids it."""
    from nightshift.envs.suites import SUITES, suite_tasks

    candidates = [task for each in ([suite] if suite else SUITES) for task in suite_tasks(each)]
    found = [task for task in candidates if task.name == name]
    if len(found) > 1:
        suites = " or ".join(f"--suite {task.suite}" for task in found)
        raise ProjectError(f"{name} is a task of several suites", f"say which: {suites}")
    if not found:
        close = difflib.get_close_matches(name, [task.name for task in candidates], n=3, cutoff=0.4)
        where = f"suite {suite}" if suite else "any suite"
        hint = f"did you mean {', '.join(close)}? " if close else ""
        raise SimulatorError(f"there is no task {name!r} in {where}", f"{hint}nightshift env list shows them all")
    return found[0]


def _training(task: Task) -> str:
    try:
        return f"{envs.init_state_count(task, 'train')} for training"
    except StatesNotDrawn as error:
        return f"none for training yet: {error.next_step}"


def _steps(task: Task, chosen: config.Env) -> Text:
    """Until an episode counts as failed, by protocol; the one of params.yaml stands out."""
    text = Text()
    for name, protocol in protocols.PROTOCOLS.items():
        if task.suite in protocol.max_steps:
            style = "bold" if name == chosen.protocol else ""
            text.append(f"{protocol.max_steps[task.suite]} by {name}\n", style=style)
    if not text:
        text.append("no protocol has this suite: env.horizon in params.yaml says\n")
    text.right_crop(1)
    return text


def _picture(task: Task, protocol: str) -> str:
    """The file with what each camera sees in evaluation state 0, side by side, or why there is none."""
    from PIL import Image

    try:
        env = envs.make(task, protocol)
        env.reset("eval", 0)
        views = env.look(CAMERAS)
    except SimulatorError as error:
        return f"none: {error.what}\n             nightshift env check says how to get it"
    path = paths.PICTURES / task.suite / f"{task.name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.concatenate([views[camera] for camera in CAMERAS], axis=1)).save(path)
    env.close()
    return str(path)


def _findings(params: config.Params) -> Iterator[Finding]:
    yield from _packages()
    yield _selection(params)
    yield _assets(params.env)
    yield _gl()
    yield _compiled()


def _packages() -> Iterator[Finding]:
    """The simulator's packages against the versions that the project was tested with."""
    lines = [line.partition("#")[0].strip() for line in REQUIREMENTS.read_text().splitlines()]
    for package, _, wanted in (line.partition("==") for line in lines if line):
        try:
            found = version(package)
        except PackageNotFoundError:
            yield Finding(about=package, found="not installed", verdict="missing", remedy=INSTALL)
            continue
        if found == wanted:
            yield Finding(about=package, found=found)
        else:
            note = f"{found}, but results here are of {wanted}: do not compare them"
            yield Finding(about=package, found=note, verdict="note", remedy=INSTALL)


def _selection(params: config.Params) -> Finding:
    """Suite, tasks, protocol and horizon of params.yaml, and the states they need."""
    try:
        tasks = envs.tasks(params.env)
        horizon = envs.horizon(params.env)
        held_out = sum(envs.init_state_count(task, "eval") for task in tasks)
        found = f"{params.env.suite}, tasks: {len(tasks)}, {params.env.protocol}, {horizon} steps"
        training = sum(envs.init_state_count(task, "train") for task in tasks)
    except StatesNotDrawn as error:
        note = f"{found}; training states are not drawn yet: nightshift run does, or {error.next_step}"
        return Finding(about="params.yaml", found=note, verdict="note")
    except NightshiftError as error:
        return Finding(about="params.yaml", found=error.what, verdict="missing", remedy=error.next_step)
    return Finding(about="params.yaml", found=f"{found}; {held_out} evaluation states, {training} for training")


def _assets(env: config.Env) -> Finding:
    from nightshift.envs.suites import REAL_SUITES

    needed = env.suite in REAL_SUITES
    missing = _missing_assets()
    if missing is None:
        from nightshift.envs.suites import real_assets

        return Finding(about="LIBERO's assets", found=str(real_assets()))
    unneeded = "" if needed else f" ({env.suite} needs none)"
    verdict: Verdict = "missing" if needed else "note"
    return Finding(
        about="LIBERO's assets", found=f"{missing.what}{unneeded}", verdict=verdict, remedy=missing.next_step
    )


def _missing_assets() -> SimulatorError | None:
    from nightshift.envs.suites import real_assets

    try:
        real_assets()
    except SimulatorError as error:
        return error
    return None


def _gl() -> Finding:
    from nightshift.envs.libero import can_render
    from nightshift.envs.libero_setup import NO_GL, gl_backend

    try:
        works = can_render()
    except SimulatorError as error:
        return Finding(about="simulator", found=error.what, verdict="missing", remedy=error.next_step)
    if works:
        return Finding(about="GL", found=f"{gl_backend()} draws")
    return Finding(about="GL", found=f"{gl_backend()}: no pictures, no films", verdict="note", remedy=NO_GL)


def _compiled() -> Finding:
    """The control step is compiled once per project."""
    folder = Path(os.environ["NUMBA_CACHE_DIR"])
    if any(folder.glob("envs_*/*.nbc")):
        return Finding(about="compiled step", found=f"cached in {folder}")
    return Finding(about="compiled step", found="the first run compiles it, in about 20 s", verdict="note")
