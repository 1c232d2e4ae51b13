"""`nightshift doctor`: everything that a run needs, found or missing, each with what to do."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from nightshift import config
from nightshift.cli import env_commands
from nightshift.cli.commands import enter
from nightshift.envs.base import Finding
from nightshift.errors import NightshiftError, ProjectError
from nightshift.pipeline.run import Session, stale, states_to_resume, statuses, was_killed
from nightshift.project import environment, graph, packages, paths, repository
from nightshift.telemetry.console import console

_GB = 1e9
_PORTS = {"serve": 4200, "ui": 5000}


def examine() -> None:
    """ProjectError if a run would fail."""
    lacking = env_commands.print_findings(list(_each_once(_findings(enter()))))
    if lacking:
        raise ProjectError(
            f"a run would fail here: {', '.join(dict.fromkeys(lacking))}",
            "do what is said above, then nightshift doctor",
        )
    console.print("\n[green]a run can start[/]")


def _each_once(findings: Iterable[Finding]) -> Iterable[Finding]:
    """A problem that two of them see is shown once; packages of the same version are all shown."""
    return {(f.found, "" if f.verdict == "missing" else f.about): f for f in findings}.values()


def _findings(root: Path) -> Iterator[Finding]:
    yield _folder(root)
    try:
        params = config.load(root / paths.PARAMS)
        stages = graph.load(root)
        graph.check_lock(root)
    except NightshiftError as error:
        yield _missing("files", error)
        return
    yield from env_commands.findings(params)
    yield from _params(root, params, stages)
    yield Finding(about="disk", found=f"{shutil.disk_usage(root).free / _GB:.1f} GB free")
    yield _gpu()
    yield from _versions(root)
    yield _prefect()
    yield _mlflow(root)
    yield from map(_port, _PORTS)
    yield from _page(params)


def _missing(about: str, error: NightshiftError) -> Finding:
    return Finding(about=about, found=error.what, verdict="missing", remedy=error.next_step)


def _folder(root: Path) -> Finding:
    try:
        repository.check(root)
    except NightshiftError as error:
        return _missing("folder", error)
    if was_killed(root):
        return Finding(
            about="folder", found=f"{root}; the last run was killed, and the next one resumes", verdict="note"
        )
    return Finding(about="folder", found=str(root))


def _params(root: Path, params: config.Params, stages: dict[str, graph.Definition]) -> Iterator[Finding]:
    """What does not fit, for all stages that a run would do."""
    from nightshift.pipeline import precheck

    try:
        to_do = stale(statuses(root))
        states = states_to_resume(to_do, Session(root))
    except (NightshiftError, ModuleNotFoundError):  # what is wrong is told elsewhere, and a compute node has no DVC
        to_do, states = [name for name in stages if not params.skips(name)], {}
    for problem in precheck.problems(params, [stages[name] for name in to_do], states):
        yield _missing("params.yaml", problem)


def _gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding(about="GPU", found="none: policies act and learn on the CPU", verdict="note")
    free, total = torch.cuda.mem_get_info()
    return Finding(
        about="GPU", found=f"{torch.cuda.get_device_name()}, {free / _GB:.1f} of {total / _GB:.1f} GB of memory free"
    )


def _versions(root: Path) -> Iterator[Finding]:
    """What runs the pipeline against the versions that were tested together."""
    tested = packages.tested(root)
    for package in (*packages.PIPELINE, "torch"):
        found, wanted = packages.release(package), tested.get(package)
        if found == "none":
            remedy = "pip install -e '.[pipeline]'"
            yield Finding(about=package, found="not installed", verdict="missing", remedy=remedy)
        elif wanted and found != wanted:
            yield Finding(about=package, found=f"{found}; tested with {wanted}", verdict="note")
        else:
            yield Finding(about=package, found=found)


def _prefect() -> Finding:
    from flows import server

    address = os.environ.get(server.ADDRESS)
    if not address:
        return Finding(about="Prefect", found="a server of our own, for as long as a run or `nightshift serve` lasts")
    try:
        server.check(address)
    except NightshiftError as error:
        return _missing("Prefect", error)
    return Finding(about="Prefect", found=environment.without_password(address))


def _mlflow(root: Path) -> Finding:
    from nightshift.adapters import mlflow_tracking

    try:
        client = mlflow_tracking.connect(root)
    except NightshiftError as error:
        return _missing("MLflow", error)
    return Finding(about="MLflow", found=environment.without_password(client.tracking_uri))


def _page(params: config.Params) -> Iterator[Finding]:
    """A port that anything else has is a problem of params.yaml."""
    from nightshift.interventions.opening import served_page

    if page := served_page(params.rlpd.interventions, params.machine):
        yield Finding(about=f"port {params.machine.page_address[1]}", found=page)


def _port(command: str) -> Finding:
    from flows import server

    port = _PORTS[command]
    if server.answers(server.local_url(port)):
        return Finding(about=f"port {port}", found="a Prefect server, which nightshift serve uses")
    try:
        server.check_port(port, command)
    except NightshiftError as error:
        return Finding(about=f"port {port}", found=error.what, verdict="note", remedy=error.next_step)
    return Finding(about=f"port {port}", found=f"free for nightshift {command}")
