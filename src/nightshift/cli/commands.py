"""What each command of the CLI does. Heavy packages are imported by the commands that need them, and no earlier."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich import box, filesize
from rich.table import Table
from rich.text import Text

from nightshift import config, interrupts
from nightshift.adapters.dvc_store import NEVER_RUN, DvcStore, StageStatus
from nightshift.errors import Busy, ProjectError
from nightshift.pipeline import summary
from nightshift.pipeline.results import interval
from nightshift.pipeline.run import (
    Choice,
    Session,
    StageResult,
    check_free,
    ensure,
    following,
    run_stage,
    stale,
    states_to_resume,
    statuses,
    was_killed,
)
from nightshift.project import environment, graph, packages, paths, repository, versions
from nightshift.telemetry.console import console, show_warnings

DVC_STAGE = "DVC_STAGE"
"""Environment variable that DVC sets for the command of a stage."""


def enter(*, own_prefect: bool = False) -> Path:
    """Go to the project's root and set up the tools; every command begins here."""
    root = repository.find(Path.cwd())
    os.chdir(root)
    environment.apply(root, own_prefect=own_prefect)
    show_warnings()
    return root


def run(from_stage: str, force_stages: Sequence[str]) -> None:
    """The pipeline; when all of it is fresh, the summary alone."""
    started = time.monotonic()
    root = enter(own_prefect=True)
    found = statuses(root)
    choice = Choice.of(root, from_stage, force_stages)
    used = [status.name for status in found if not status.skipped or status.name in choice.forced]
    to_do = choice.selected(used, stale(found))
    if not to_do and not was_killed(root):  # what a killed run left in Prefect and MLflow is marked by a flow
        results = _nothing_stale(root, found)
    else:
        check_free(root)
        told = ", ".join(to_do) or "nothing but to mark the last run as dead"
        console.print(f"[bold]nightshift[/]  to do: {told}   [dim](nightshift plan says why)[/]")
        with _compiling(root):
            results = _run_flow(choice)
    console.print(summary.render(summary.gather(root, results, time.monotonic() - started)))


def nightly() -> None:
    """What the schedule starts every night, now: new demos, the pipeline if anything is stale, a commit."""
    root = enter(own_prefect=True)
    from nightshift.pipeline import nightly as night
    from nightshift.pipeline import notify

    started = datetime.now(UTC)
    died = was_killed(root)  # asked before the first session, which ends what the dead run left in MLflow
    try:
        if not night.play(root, lambda: run("", []), _tell):
            return
        if died:
            _run_flow(Choice())  # marks what the dead run left in Prefect, and notifies people
        else:
            notify.finished(root, [])
    except Busy as busy:
        night.refused(root, started, busy)
        raise
    except Exception as error:
        if not interrupts.caused(error):
            night.failed(root, started, error)
        raise


def _tell(sentence: str) -> None:
    console.print(sentence, markup=False, soft_wrap=True)


def _nothing_stale(root: Path, found: Sequence[StageStatus]) -> list[StageResult]:
    """The results without a flow. Other inputs of a skipped stage are recorded, so that `dvc repro` finds it fresh."""
    results = {status.name: StageResult(stage=status.name, status="cached", seconds=0.0) for status in found}
    skipped = [status for status in found if status.skipped]
    results |= {
        status.name: StageResult(
            stage=status.name, status="skipped", seconds=0.0, reasons=(config.skip_reason(status.name),)
        )
        for status in skipped
    }
    if outdated := [status.name for status in skipped if not status.fresh]:
        with Session(root) as session:
            results |= {name: ensure(name, session) for name in outdated}
    return list(results.values())


def stage(names: Sequence[str]) -> None:
    """Stages in one process, unconditionally; dvc.yaml calls this, so DVC is not asked."""
    with Session(enter()) as session:
        session.precheck(_to_check(names, session))
        for name in names:
            if packages.on_compute_node():
                _stage_on_node(name, session)
            else:
                run_stage(name, session)
            if session.params.skips(name):
                console.print(f"[dim]– {name}  skipped ({config.skip_reason(name)})[/]")


def _to_check(names: Sequence[str], session: Session) -> list[str]:
    """`dvc repro` and `dvc exp run` start a process for each stage: the first has to check those that come after it."""
    started_by_dvc = DVC_STAGE in os.environ and not all(map(session.params.skips, names))
    return [*names, *(following(names[-1], session) if started_by_dvc else [])]


def _stage_on_node(name: str, session: Session) -> None:
    from nightshift.pipeline import receipt

    path = receipt.run_with_receipt(name, session)
    console.print(f"{path.relative_to(session.root)} says what it was made of   [dim]next: nightshift pack[/]")


def pack(stages: list[str], archive: Path, left_out: list[Path]) -> None:
    """What these stages made here, as one file."""
    from nightshift.pipeline import receipt

    archive = Path.cwd() / archive
    packed = receipt.pack(enter(), stages, archive, left_out)
    begun = [f"{stage} (unfinished)" for stage in packed.unfinished]
    names = ", ".join([*(result.stage for result in packed.results), *begun])
    console.print(f"{archive}: {names}, {filesize.decimal(archive.stat().st_size)}", soft_wrap=True)
    for path, reader in packed.needed.items():
        console.print(f"{path} is not left out: {reader}, which reads it, is not done", soft_wrap=True)
    if packed.outdated:
        what = "their params, code or inputs have changed"
        console.print(f"without the results of {', '.join(packed.outdated)}: {what}", soft_wrap=True)


def adopt(source: Path, *, accept_versions: bool) -> None:
    """Results of a compute node become results of this project."""
    from nightshift.pipeline.adopt import adopt as take_over

    source = Path.cwd() / source
    for receipt, new in take_over(enter(), source, accept_versions=accept_versions):
        done = f"adopted: {receipt.seconds:.1f} s on {receipt.host}" if new else "was adopted before"
        console.print(f"[green]✔ {receipt.stage}[/]  {done}", soft_wrap=True)


def plan() -> None:
    """Every stage, fresh or stale, and why; and what stands in the way of those that would run."""
    root = enter()
    found = statuses(root)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in ("stage", "", "why"):
        table.add_column(column, style="bold" if column == "stage" else "")
    for status in found:
        table.add_row(status.name, _mark(status), Text("\n".join(_why(status)), style="dim"))
    console.print(table)
    if to_do := stale(found):
        from nightshift.pipeline import precheck  # imports numpy: only if there is something to check

        session = Session(root)
        precheck.check(session.params, [session.graph[name] for name in to_do], states_to_resume(to_do, session))
        _print_page(session.params)


def _print_page(params: config.Params) -> None:
    from nightshift.interventions.opening import served_page

    if page := served_page(params.rlpd.interventions, params.machine):
        console.print(f"{params.machine.page} is {page}", soft_wrap=True)


def _mark(status: StageStatus) -> Text:
    if status.skipped:
        return Text("– skipped", style="dim")
    return Text("○ fresh", style="green") if status.fresh else Text("● stale", style="yellow")


def _why(status: StageStatus) -> list[str]:
    if status.skipped:
        return [f"({config.skip_reason(status.name)})"]
    why = list(status.reasons)
    if status.follows and why != [NEVER_RUN]:
        why.append(f"follows {', '.join(status.follows)}")
    return why


def package_versions() -> None:
    """Write and show the installed versions that results depend on; `dvc repro` needs the file."""
    root = enter()
    for package, version in packages.record(root, graph.load(root)).items():
        console.print(f"{package:<12} {version}", highlight=False)


def collect_garbage(*, dry_run: bool, everything: bool) -> None:
    """Remove old checkpoints, journals of old policies and clones of old sweeps, and print a line for each."""
    from nightshift.pipeline import gc

    freed = 0
    for found in gc.collect(enter(), dry_run=dry_run, everything=everything):
        if found.kept_for:
            console.print(
                f"[dim]kept {found.path}  {filesize.decimal(found.size)}  {found.kept_for}[/]", soft_wrap=True
            )
            continue
        freed += found.size
        done = "would remove" if dry_run else "removed"
        console.print(f"{done} {found.path}  {filesize.decimal(found.size)}", soft_wrap=True)
    console.print(f"[bold]{filesize.decimal(freed)}[/] {'would be freed' if dry_run else 'freed'}")


def dataset_ls() -> None:
    """The versions of the dataset that git and DVC know."""
    root = enter()
    repository.check(root)
    found = versions.versions(root, paths.DATASET)
    if not found:
        raise ProjectError("there is no dataset yet", "nightshift run")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in ("version", "md5", "date", "commit message"):
        table.add_column(column)
    for version in found:
        table.add_row(f"[bold cyan]{version.revision}[/]", version.md5[:12], version.date, Text(version.subject))
    console.print(table)
    console.print("[dim]nightshift dataset show VERSION tells what is in one[/]")


def dataset_show(revision: str) -> None:
    """What one version of the dataset holds."""
    from nightshift.data import dataset_store

    root = enter()
    repository.check(root)
    versions.resolve(root, revision)
    content = dataset_store.describe(DvcStore(root).read_file(revision, paths.DATASET / dataset_store.INDEX))
    console.print(
        f"[bold]{paths.DATASET}[/] at [cyan]{revision}[/]: {content['episodes']} episodes, {content['steps']} steps"
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in ("task", "split", "episodes", "steps"):
        table.add_column(column, justify="right" if column in ("episodes", "steps") else "left")
    for row in content["rows"]:
        table.add_row(*map(str, row))
    console.print(table)
    for key in ("sources", "suites", "versions", "commits"):
        console.print(f"[dim]{key:<9}[/] {', '.join(content[key])}")


def predict(model: str, task: str, episodes: int) -> None:
    """A registered model, loaded back and acting."""
    from nightshift.pipeline.predict import predict as act

    rates = act(enter(), model, task, episodes)
    for name, rate in rates.items():
        console.print(
            f"{name:<24} [bold]{100 * rate.rate:5.1f} %[/]  {rate.successes}/{rate.episodes}"
            f"   [dim]95 % interval {interval(rate.low, rate.high)}[/]"
        )


def ui(port: int) -> None:
    """MLflow's pages on the local store, until Ctrl-C; a server of MLflow has its own, whose address is told."""
    from flows.server import check_port

    root = enter()
    if os.environ[environment.TRACKING_URI].startswith("http"):
        console.print(f"MLflow: [cyan]{environment.mlflow_pages()}[/]   [dim](its own server)[/]")
        return
    check_port(port, "ui")
    (root / paths.MLFLOW_ARTIFACTS).mkdir(parents=True, exist_ok=True)
    console.print(f"MLflow: [cyan]http://127.0.0.1:{port}[/]   [dim](ready in about 15 s; Ctrl-C ends it)[/]")
    store = ["--backend-store-uri", os.environ[environment.TRACKING_URI]]
    artifacts = ["--artifacts-destination", str(root / paths.MLFLOW_ARTIFACTS)]
    address = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    os.execv(sys.executable, [sys.executable, "-m", "mlflow", "server", *store, *artifacts, *address])


def serve(port: int) -> None:
    """Wait for runs asked for by hand, and start one every night."""
    repository.check(enter())
    from flows.server import lasting_server

    with lasting_server(port) as url:
        from flows.local import serve_forever

        shown = environment.without_password(url).removesuffix("/api")
        console.print(f"Prefect: [cyan]{shown}[/]   [dim]prefect deployment run pipeline/pipeline[/]")
        serve_forever(url)


@contextlib.contextmanager
def _compiling(root: Path) -> Iterator[None]:
    """Compile the simulator in a process of its own while Prefect's server starts: simulator processes wait for it, and
    then only load."""
    from nightshift import envs  # imports numpy, which `nightshift plan` need not wait for

    command = envs.suite(config.load(root / paths.PARAMS).env.suite).compile_command()
    if command is None:
        yield
        return
    # An error there is not lost: the first simulator meets it again.
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def _run_flow(choice: Choice) -> list[StageResult]:
    """The flow in this process, on the server that PREFECT_API_URL names or else on a temporary one."""
    from flows.server import ADDRESS, check, temporary_server

    if address := os.environ.get(ADDRESS):
        check(address)
        from flows.local import run_once

        return run_once(choice)
    with temporary_server() as server:
        import nightshift.adapters.mlflow_tracking  # noqa: F401  # seconds of importing while the server gets ready
        from flows.local import run_once

        server.wait()
        return run_once(choice)
