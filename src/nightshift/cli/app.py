"""`nightshift …`: parses and calls. What the commands do is in commands.py."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from nightshift import interrupts
from nightshift.errors import NightshiftError, ServerGone

if TYPE_CHECKING:
    from nightshift.cli import (
        actor_commands,
        classifier_commands,
        commands,
        compare_command,
        data_commands,
        env_commands,
        model_commands,
        report_commands,
        robot_commands,
        robustness_command,
        teleop_commands,
    )
else:

    class _OnFirstUse:
        """A module that is imported when a command needs it: `nightshift --help` waits for none of them."""

        def __init__(self, name: str) -> None:
            self._name = f"nightshift.cli.{name}"

        def __getattr__(self, attribute: str) -> Any:
            return getattr(importlib.import_module(self._name), attribute)

    actor_commands = _OnFirstUse("actor_commands")
    classifier_commands = _OnFirstUse("classifier_commands")
    commands = _OnFirstUse("commands")
    compare_command = _OnFirstUse("compare_command")
    data_commands = _OnFirstUse("data_commands")
    env_commands = _OnFirstUse("env_commands")
    model_commands = _OnFirstUse("model_commands")
    report_commands = _OnFirstUse("report_commands")
    robot_commands = _OnFirstUse("robot_commands")
    robustness_command = _OnFirstUse("robustness_command")
    teleop_commands = _OnFirstUse("teleop_commands")

INTERRUPTED = 130

app = typer.Typer(
    help="Trains robot policies overnight.", no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False
)
dataset_app = typer.Typer(help="The versions of the dataset.", no_args_is_help=True)
app.add_typer(dataset_app, name="dataset")
env_app = typer.Typer(help="The simulated tasks: which there are, and whether they run here.", no_args_is_help=True)
app.add_typer(env_app, name="env")
classifier_app = typer.Typer(help="Success from camera images, as a reward for rlpd.", no_args_is_help=True)
app.add_typer(classifier_app, name="classifier")
robot_app = typer.Typer(help="Robots, and simulators that pose as one, behind HTTP.", no_args_is_help=True)
app.add_typer(robot_app, name="robot")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"nightshift {importlib.metadata.version('nightshift')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="and exit")] = False,
) -> None:
    """Trains robot policies overnight."""


Suite = Annotated[str, typer.Option(help="one suite; all of them if not given")]


@app.command()
def run(
    from_stage: Annotated[
        str, typer.Option(help="begin here; results of the stages before are taken as they are")
    ] = "",
    force_stage: Annotated[list[str] | None, typer.Option(help="run it even if it is fresh; may be repeated")] = None,
) -> None:
    """Run every stage that is stale, and show the results."""
    commands.run(from_stage, force_stage or [])


@app.command()
def nightly() -> None:
    """Import new demos, run what is stale and commit the new versions, as the schedule does every night."""
    commands.nightly()


@app.command()
def plan() -> None:
    """Show each stage, fresh or stale, and why."""
    commands.plan()


@app.command()
def doctor() -> None:
    """Say whether a run would work here: params, data, simulators, GPU, disk, ports, servers and versions."""
    from nightshift.cli import doctor as examination

    examination.examine()


@app.command()
def report(
    everything: Annotated[bool, typer.Option("--all", help="a site of all nights instead, with links")] = False,
) -> None:
    """Write the report of the last run: one HTML file, to look at, mail or print."""
    report_commands.all_nights() if everything else report_commands.report()


@app.command()
def stage(names: Annotated[list[str], typer.Argument(help="of dvc.yaml, in order")]) -> None:
    """Run stages whether they are stale or not; `dvc repro` calls this."""
    commands.stage(names)


@app.command()
def pack(
    stages: Annotated[
        list[str] | None,
        typer.Argument(help="if not given, all whose results are current, and checkpoints of the others"),
    ] = None,
    to: Annotated[Path, typer.Option(help="the archive to write: .tar, or .tar.xz and the like")] = Path("results.tar"),
    leave_out: Annotated[
        list[Path] | None,
        typer.Option(help="an output of which only the manifest is packed, such as data/demos; can be repeated"),
    ] = None,
) -> None:
    """On a compute node: put results, receipts and metrics into an archive for `adopt`, or for another node."""
    commands.pack(stages or [], to, leave_out or [])


@app.command()
def adopt(
    source: Annotated[
        Path, typer.Argument(help="what `pack` wrote on a compute node, or a copy of its project folder")
    ],
    accept_versions: Annotated[
        bool, typer.Option("--accept-versions", help="although the node has other versions of packages")
    ] = False,
) -> None:
    """Take over what a compute node computed, as if the stages had run here."""
    commands.adopt(source, accept_versions=accept_versions)


@app.command()
def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would be removed")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="interrupted runs and sweeps too: they will start over")
    ] = False,
) -> None:
    """Remove checkpoints and journals of params, code and inputs that are not current, and clones of old sweeps."""
    commands.collect_garbage(dry_run=dry_run, everything=everything)


@app.command()
def versions() -> None:
    """Write the installed versions that results depend on to versions.yaml, as every run does; show them."""
    commands.package_versions()


@app.command("import")
def import_(
    path: Annotated[Path, typer.Argument(help="a file or a folder")],
    format: Annotated[str, typer.Option(help="hdf5 (LIBERO, robomimic), hil-serl, lerobot, rlds, or of a package")],
    name: Annotated[str, typer.Option(help="what to call it here")],
    task: Annotated[str, typer.Option(help="the task, where the source does not say it")] = "",
    skip_broken: Annotated[bool, typer.Option("--skip-broken", help="leave broken episodes out and list them")] = False,
    max_episode_gb: Annotated[
        float | None, typer.Option(help="how large an episode may be in memory, instead of the default limit")
    ] = None,
) -> None:
    """Bring in successful episodes from another format; run again to resume."""
    data_commands.import_episodes(path, format, name, task, skip_broken=skip_broken, max_episode_gb=max_episode_gb)


@app.command()
def export(
    path: Annotated[Path, typer.Argument(help="the folder to make")],
    format: Annotated[str, typer.Option(help="rlds or lerobot")],
    split: Annotated[str, typer.Option(help="all, train or validation")] = "all",
    video: Annotated[bool, typer.Option("--video", help="lerobot: pictures as MP4, smaller and not exact")] = False,
) -> None:
    """Hand the dataset out in another format."""
    data_commands.export(path, format, split, video=video)


@dataset_app.command("ls")
def dataset_ls() -> None:
    """List the versions."""
    commands.dataset_ls()


@dataset_app.command("show")
def dataset_show(revision: Annotated[str, typer.Argument(help="a version from `ls`, or any git revision")]) -> None:
    """Tell what is in a version."""
    commands.dataset_show(revision)


@dataset_app.command("stats")
def dataset_stats(
    source: Annotated[str, typer.Argument(help="an import's name, or demos; the dataset if not given")] = "",
    plot: Annotated[Path | None, typer.Option(help="a PNG file to draw the histograms into")] = None,
) -> None:
    """Tell how long, how rewarded and how diverse the episodes are, with histograms."""
    data_commands.stats(source, plot)


@env_app.command("list")
def env_list(suite: Suite = "") -> None:
    """List the suites and their tasks, with instructions."""
    env_commands.list_tasks(suite)


@env_app.command("show")
def env_show(task: Annotated[str, typer.Argument(help="the name of a task, of any suite")], suite: Suite = "") -> None:
    """Tell what a task is: goal, init states, steps, and a picture."""
    env_commands.show(task, suite)


@env_app.command("check")
def env_check() -> None:
    """Say whether the suite in params.yaml can run here, and how to get what is missing."""
    env_commands.check()


@classifier_app.command("record")
def classifier_record(
    policy: Annotated[Path, typer.Option(help="the folder of the policy that plays")] = Path("models/sft"),
    episodes: Annotated[int, typer.Option(min=1, help="per task, from training states")] = 100,
    temperature: Annotated[float, typer.Option(min=0.01, help="of the actions that it samples")] = 1.0,
) -> None:
    """Let a policy play, and keep its successes and failures for training."""
    classifier_commands.record(policy, episodes, temperature)


@classifier_app.command("train")
def classifier_train() -> None:
    """Train it, and choose the threshold that reaches classifier.precision."""
    classifier_commands.train()


@classifier_app.command("evaluate")
def classifier_evaluate() -> None:
    """Show its mistakes on episodes that it has not seen."""
    classifier_commands.evaluate()


RobotUrl = Annotated[str, typer.Argument(help="of the robot server, http://HOST:PORT")]


@robot_app.command("serve")
def robot_serve(
    suite: Annotated[str, typer.Option(help="whose simulators are served")] = "libero_mini",
    task: Annotated[list[str] | None, typer.Option(help="may be repeated; all tasks if not given")] = None,
    host: Annotated[str, typer.Option(help="any other than 127.0.0.1 needs NIGHTSHIFT_ROBOT_TOKEN")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 5050,
    watchdog: Annotated[float, typer.Option(min=0.01, help="seconds without a command until it is held")] = 5.0,
) -> None:
    """Put simulated tasks behind the protocol of a robot server."""
    robot_commands.serve(suite, task or [], (host, port), watchdog)


@robot_app.command("check")
def robot_check(
    url: RobotUrl,
    move: Annotated[
        bool,
        typer.Option(
            "--move",
            help="also commands it; a server that is wrong may go anywhere in its reach: hand on the stop button",
        ),
    ] = False,
) -> None:
    """Say what a robot server does wrong. Without --move it is read and stopped only."""
    robot_commands.check(url, move=move)


@robot_app.command("stop")
def robot_stop(url: RobotUrl) -> None:
    """Stop a robot until it is released. Its own stop button works without a network."""
    robot_commands.stop(url)


@robot_app.command("release")
def robot_release(url: RobotUrl) -> None:
    """Free a robot that a person stopped."""
    robot_commands.release(url)


@robot_app.command("answer")
def robot_answer(
    kind: Annotated[str, typer.Argument(help="which question: reset or success; without, show the open one")] = "",
    word: Annotated[str, typer.Argument(help="yes or no")] = "",
) -> None:
    """Answer what a run asks the person beside the robot."""
    robot_commands.answer(kind, word)


@robot_app.command("page")
def robot_page(
    host: Annotated[str, typer.Option(help="another than this machine's own needs NIGHTSHIFT_TOKEN")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="of the page; 0 = a free one")] = 8601,
) -> None:
    """Ask on a web page what a run asks the person beside the robot."""
    robot_commands.page(host, port)


@app.command()
def actor(
    learner: Annotated[str, typer.Option(help="HOST:PORT of the machine that trains (machine.listen there)")],
    name: Annotated[str, typer.Option(help="unique among the actors; made of machine and folder if not given")] = "",
) -> None:
    """Play for the stage rlpd on another machine; the variable NIGHTSHIFT_TOKEN has its token."""
    actor_commands.join(learner, name)


@app.command()
def teleop(
    name: Annotated[str, typer.Option(help="the source to record into: data/imports/NAME")],
    policy: Annotated[
        str, typer.Option(help="that drives until you take over: a folder, champion, challenger or a version")
    ] = "",
    host: Annotated[str, typer.Option(help="another than this machine's own needs NIGHTSHIFT_TOKEN")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="of the page; 0 = a free one")] = 8600,
) -> None:
    """Move the robot from a web page: record demos, watch a policy, take over and hand back."""
    teleop_commands.teleop(name, policy, host, port)


@app.command()
def models() -> None:
    """List the versions of the model: which is champion, results, and what the gate said."""
    model_commands.models()


@app.command()
def promote(version: Annotated[str, typer.Argument(help="a version number, or challenger")]) -> None:
    """Make a version champion by hand."""
    model_commands.promote(version)


@app.command()
def rollback() -> None:
    """Make the champion before this one champion again."""
    model_commands.rollback()


@app.command()
def lineage(
    model: Annotated[str, typer.Argument(help="MODEL@ALIAS, MODEL/VERSION, or an alias or version")] = "champion",
) -> None:
    """Tell what a version was made of: dataset, code, params, and the versions it started from."""
    model_commands.lineage(model)


@app.command()
def runs(limit: Annotated[int, typer.Option(min=1, help="how many of the newest")] = 20) -> None:
    """List the runs of the pipeline: results, versions, and which params were changed."""
    model_commands.runs(limit)


@app.command()
def compare(
    one: Annotated[str, typer.Argument(help="a version, an alias, MODEL@ALIAS, or a run from `runs`")],
    other: Annotated[str, typer.Argument(help="the one to compare with")],
) -> None:
    """Compare two versions or runs, state by state where they have played the same grid."""
    compare_command.compare(one, other)


@app.command("export-policy")
def export_policy(
    policy: Annotated[str, typer.Argument(help="champion, challenger, a version number, or a policy's folder")],
    to: Annotated[Path, typer.Option(help="the folder to make")],
    base: Annotated[
        Path | None, typer.Option(help="the published checkpoint that it began with, if that was moved")
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option(help="the published adapter that was merged into that, if it was moved")
    ] = None,
) -> None:
    """Write a policy in the layout of the published checkpoint that it began with, adapters merged."""
    model_commands.export_policy(policy, to, base, adapter)


@app.command()
def reproduce(
    run: Annotated[str, typer.Argument(help="the id of a run, or its beginning, from `runs`")],
    to: Annotated[Path | None, typer.Option(help="the folder to make; beside the project if not given")] = None,
) -> None:
    """Check out the code, params and data of a run in a folder of its own, and say how to run it."""
    model_commands.reproduce(run, to)


@app.command()
def sweep(
    choices: Annotated[list[str], typer.Argument(help="NAME=VALUE,VALUE of params.yaml, as sft.steps=100,200")],
    sample: Annotated[int, typer.Option(min=0, help="this many combinations at random; 0 = all")] = 0,
    jobs: Annotated[
        int, typer.Option(min=0, help="trials at a time; 0 = one, or on a Ray cluster as many as it has room for")
    ] = 0,
) -> None:
    """Train and evaluate with every combination of values, and show which is best; nothing is registered."""
    model_commands.sweep(choices, sample, jobs)


@app.command()
def predict(
    model: Annotated[str, typer.Option(help="champion, challenger or a version number")] = "champion",
    task: Annotated[str, typer.Option(help="one task; all tasks of params.yaml if not given")] = "",
    episodes: Annotated[int, typer.Option(min=1, help="per task")] = 10,
) -> None:
    """Load a registered model and let it act in the simulator."""
    commands.predict(model, task, episodes)


@app.command()
def robustness(
    policy: Annotated[
        str,
        typer.Argument(help="champion, challenger, a version number, or a policy's folder", show_default="champion"),
    ] = "",
    against: Annotated[
        str, typer.Option(help="another one, on the same episodes; fails beyond register.max_perturbation_drop")
    ] = "",
    retry_lost: Annotated[
        bool, typer.Option("--retry-lost", help="play episodes again that the simulator lost, such as after a repair")
    ] = False,
    listing: Annotated[bool, typer.Option("--list", help="only show the perturbations")] = False,
    page: Annotated[
        bool, typer.Option("--page", help="only show reports/robustness again, such as a compute node's")
    ] = False,
) -> None:
    """Evaluate a policy under perturbations of scene, camera, actions and instruction; run again to resume."""
    given: dict[str, str | bool] = {"POLICY": policy, "--against": against, "--retry-lost": retry_lost}
    if listing:
        robustness_command.check_alone("--list", {"--page": page, **given})
        robustness_command.listing()
    elif page:
        robustness_command.check_alone("--page", given)
        robustness_command.page()
    else:
        robustness_command.evaluate(policy or "champion", against, retry_lost=retry_lost)


@app.command()
def ui(port: Annotated[int, typer.Option(min=1, max=65535, help="on this machine")] = 5000) -> None:
    """Show MLflow's pages: runs, curves, models."""
    commands.ui(port)


@app.command()
def serve(
    port: Annotated[int, typer.Option(min=1, max=65535, help="of Prefect's server on this machine")] = 4200,
) -> None:
    """Run the pipeline every night, and on demand."""
    commands.serve(port)


def main() -> None:
    """Run a command; every error meant for people is one sentence and an exit code."""
    interrupts.handle()
    try:
        app()
    except NightshiftError as error:
        _fail(error)
    except ModuleNotFoundError as error:
        from nightshift.project import packages

        _fail(packages.missing(error) or error)
    except BrokenPipeError:
        from nightshift.telemetry.console import end_quietly

        end_quietly()
    except OSError as error:
        from nightshift import files

        _fail(files.refusal(error) or error)
    except KeyboardInterrupt:  # outside of what typer runs, which turns it into an exit
        _stop()
    except SystemExit as end:
        if end.code not in (INTERRUPTED, signal.SIGTERM):  # while Ray starts, its handler exits with the latter
            raise
        _stop()
    except Exception as error:
        if not interrupts.caused(error):
            raise
        _stop()


def _fail(error: Exception) -> NoReturn:
    if not isinstance(error, NightshiftError):
        raise error
    _say(f"error: {error}")
    if isinstance(error, ServerGone):
        _leave()
    sys.exit(1)


def _leave() -> NoReturn:
    """Without the exit handlers of Prefect, which try for minutes to deliver what is left to a server that is gone."""
    with contextlib.suppress(OSError):  # `| head`
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(1)


def _stop() -> NoReturn:
    _say("stopped; run again to resume")
    sys.exit(INTERRUPTED)


def _say(sentence: str) -> None:
    from nightshift.telemetry.console import errors

    errors.print(sentence, markup=False)
