"""The commands `nightshift env …`: list suites and tasks, show one task, check whether a suite runs here."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from nightshift import config, envs
from nightshift.cli.commands import enter
from nightshift.envs import protocols, registry
from nightshift.envs.base import Finding, Predicate, Suite, Verdict
from nightshift.errors import NightshiftError, ProjectError, SimulatorError, StatesNotDrawn
from nightshift.pipeline import precheck
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
    "reach": "{} reached",
}
"""The suites' predicates as words."""

REQUIREMENTS = Path("requirements-simulator.txt")
INSTALL = f"pip install --no-deps -r {REQUIREMENTS}"

MARKS: dict[Verdict, tuple[str, str]] = {"good": ("✔", "green"), "note": ("•", "yellow"), "missing": ("✘", "bold red")}


def list_tasks(suite: str) -> None:
    """Every suite, or one, with its tasks."""
    enter()
    lacking = False
    for selected in [envs.suite(name) for name in ([suite] if suite else registry.names())]:
        tasks = selected.tasks()
        if not tasks:
            console.print(f"[bold]{selected.name}[/]  [dim]the tasks of the server in env.robot of params.yaml[/]")
            continue
        missing = _missing_assets(selected)
        lacking = lacking or missing is not None
        available = "[red]assets missing[/]" if missing else "assets there" if selected.assets() else "built in"
        joined = selected.benchmarks() if len(selected.benchmarks()) > 1 and not suite else ()
        parts = f": those of {', '.join(joined)}" if joined else ""
        console.print(f"[bold]{selected.name}[/]  [dim]{len(tasks)} tasks, {available}{parts}[/]")
        if not joined:
            _print_tasks(tasks)
    if lacking:
        console.print("[dim]nightshift env check says how to get the assets[/]")


def show(name: str, suite: str) -> None:
    """One task, with a picture where one can be drawn."""
    root = enter()
    chosen = config.load(root / paths.PARAMS).env
    task = _find(name, suite)
    selected = envs.suite(task.suite)
    console.print(f"[bold]{task.name}[/]\n[dim]task {task.index} of {task.suite}, which has {task.suite_size}[/]\n")
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("instruction", Text(task.language))
    table.add_row("goal", Text("\nand ".join(in_words(predicate) for predicate in selected.goal(task))))
    table.add_row("init states", Text(f"{envs.init_state_count(task, 'eval')} for evaluation\n{_training(task)}"))
    table.add_row("steps", _steps(task, chosen))
    table.add_row("observations", Text(_observations(selected, chosen)))
    table.add_row("actions", Text(_actions(selected)))
    console.print(table)
    console.print(Text.assemble(("\npicture", "bold"), "      ", _picture(task, chosen)), soft_wrap=True)


def check() -> None:
    """What simulating needs; SimulatorError if the suite of params.yaml cannot run."""
    root = enter()
    params = config.load(root / paths.PARAMS)
    lacking = print_findings(list(findings(params)))
    if lacking:
        raise SimulatorError(
            f"{params.env.suite}, which params.yaml selects, cannot run here: {', '.join(lacking)}",
            "do what is said above, then nightshift env check",
        )
    console.print(f"\n[green]{params.env.suite}[/], which params.yaml selects, can run here")


def print_findings(found: Sequence[Finding]) -> list[str]:
    """A table, and below it what to do; returns what is missing."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, show_header=False)
    for finding in found:
        mark, style = MARKS[finding.verdict]
        table.add_row(Text(mark, style=style), Text(finding.about, style="bold"), Text(finding.found, overflow="fold"))
    console.print(table)
    for finding in found:
        if finding.remedy:
            console.print(Text(f"{finding.about}: {finding.remedy}", style="dim"), soft_wrap=True)
    return [finding.about for finding in found if finding.verdict == "missing"]


def in_words(predicate: Predicate) -> str:
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
    """The task of that name, in the suite that it comes from; two suites may have one of the same name."""
    searched = [envs.suite(each) for each in ([suite] if suite else registry.names())]
    candidates = [task for each in searched for task in each.tasks() if suite or each.benchmark(task) == each.name]
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
    """Until an episode counts as failed, by protocol; the one of params.yaml in bold."""
    text = Text()
    for name, protocol in protocols.PROTOCOLS.items():
        if steps := protocol.max_steps.get(envs.suite(task.suite).benchmark(task)):
            style = "bold" if name == chosen.protocol else ""
            text.append(f"{steps} by {name}\n", style=style)
    if not text:
        text.append("no protocol has this suite: env.horizon in params.yaml says\n")
    text.right_crop(1)
    return text


def _observations(suite: Suite, chosen: config.Env) -> str:
    """What policy.inputs of params.yaml can name; cameras if env.cameras.names has them."""
    size = chosen.cameras.size
    sizes = {name: size.get(name, "auto") for name in suite.cameras} if isinstance(size, Mapping) else size
    every_camera = chosen.cameras.model_copy(update={"names": tuple(suite.cameras), "size": sizes})
    drawn = suite.drawing(protocols.find(chosen.protocol), every_camera).sizes
    shapes = {name: spec.shape for name, spec in suite.observation_space(drawn).items()}
    return ", ".join(f"{name} {list(shape)}" if shape else name for name, shape in shapes.items())


def _actions(suite: Suite) -> str:
    space = suite.action_space
    return f"{space.size} numbers from {space.low:g} to {space.high:g}"


def _picture(task: Task, chosen: config.Env) -> str:
    """The file with the image of each camera in evaluation state 0, side by side, or why there is none."""
    from PIL import Image

    cameras = tuple(envs.suite(task.suite).cameras)
    drawn = chosen.cameras.model_copy(update={"names": cameras, "size": "auto"})
    try:
        env = envs.make(task, chosen.model_copy(update={"cameras": drawn}))
        env.reset("eval", 0)
        images = env.camera_images(cameras)
    except SimulatorError as error:
        return f"none: {error.what}\n             nightshift env check says how to get it"
    path = paths.PICTURES / task.suite / f"{task.name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.concatenate([images[camera] for camera in cameras], axis=1)).save(path)
    env.close()
    return str(path)


def findings(params: config.Params) -> Iterator[Finding]:
    """What the simulators need, and whether it is here."""
    yield from _packages()
    yield _selection(params)
    yield from _assets(params.env.suite)
    if params.env.suite in registry.names():  # else _selection says so
        yield from envs.suite(params.env.suite).findings()


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
    """Suite, tasks, protocol, horizon and policy inputs of params.yaml, and the states they need."""
    try:
        tasks = envs.tasks(params.env)
        steps = " or ".join(map(str, sorted(set(envs.horizons(params.env).values()))))
        held_out = sum(envs.init_state_count(task, "eval") for task in tasks)
        found = f"{params.env.suite}, tasks: {len(tasks)}, {params.env.protocol}, {steps} steps"
        envs.check_cameras(params.env)
        precheck.check_policy(params)
        training = sum(envs.init_state_count(task, "train") for task in tasks)
    except StatesNotDrawn as error:
        note = f"{found}; training states are not drawn yet: nightshift run does, or {error.next_step}"
        return Finding(about="params.yaml", found=note, verdict="note")
    except NightshiftError as error:
        return Finding(about="params.yaml", found=error.what, verdict="missing", remedy=error.next_step)
    return Finding(about="params.yaml", found=f"{found}; {held_out} evaluation states, {training} for training")


def _assets(selected: str) -> Iterator[Finding]:
    """Of all suites; only the selected one has to have them."""
    found: dict[str, list[str]] = {}
    missing: dict[tuple[str, str], list[str]] = {}
    for suite in map(envs.suite, registry.names()):
        error = _missing_assets(suite)
        if error:
            missing.setdefault((error.what, error.next_step), []).append(suite.name)
        elif folder := suite.assets():
            found.setdefault(str(folder), []).append(suite.name)
    for folder_name, users in found.items():
        yield Finding(about="assets", found=f"{folder_name}, for {', '.join(users)}")
    for (what, remedy), users in missing.items():
        verdict: Verdict = "missing" if selected in users else "note"
        yield Finding(about="assets", found=f"{what}, for {', '.join(users)}", verdict=verdict, remedy=remedy)


def _missing_assets(suite: Suite) -> SimulatorError | None:
    try:
        suite.assets()
    except SimulatorError as error:
        return error
    return None
