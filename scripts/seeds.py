"""Runs the pipeline for several seeds, each in a copy of the project, and prints the result of every one.

A recipe is a file with the numbers that differ from params.yaml. With --node the stages run by themselves and leave
receipts, as on a compute node (docs/compute_node.md): Prefect, DVC and MLflow are not used even if they are installed.
What is done is not done again, an interrupted stage resumes, and after a change of the recipe the stages that it
concerns run again, so the same call can be repeated. A copy keeps the code that it was made with.

Examples:
    scripts/seeds.py .state/seeds 0 1 2 3 4 5 6 7 8 9
    scripts/seeds.py .state/pixels 0 1 2 --recipe recipes/mini_pixels.yaml --node --jobs 3
    scripts/seeds.py .state/forty 23 --recipe recipes/libero_40.yaml --node --until sft --set machine.compile=true
    scripts/seeds.py .state/spatial 11 --recipe recipes/libero_pixels.yaml --set env.suite=libero_spatial --node
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import IO, Any

import yaml

from nightshift import config, files, interrupts
from nightshift.errors import NightshiftError
from nightshift.pipeline.receipt import stale
from nightshift.pipeline.run import Session
from nightshift.project import checksums, graph, packages, paths, repository
from nightshift.reports import history, tables
from nightshift.statistics.intervals import of_mean

PROJECT = Path(__file__).parents[1]
HEADER = (
    "| seed | after SFT | trained by | after it | won, lost | gain | iteration kept |\n|---|---|---|---|---|---|---|\n"
)
COPIED = (
    paths.PARAMS,
    checksums.DVCIGNORE,
    paths.IMPORTS,
    Path("src"),
    Path("flows"),
    Path("tasks"),
    Path("pyproject.toml"),
    paths.DVC_YAML,
)
"""What the stages need of the project, where they run without git. The last says that the copy is whole."""
LINES_SHOWN = 20
"""Of the log of stages that failed."""


class Failed(Exception):
    """A process ended with an error; the text says which, and what it wrote last."""


class Stopped(Exception):
    """By a signal."""


class Processes:
    """Those that work on the seeds. Each has a session of its own, so a signal reaches it once: from here."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[bytes]] = []
        self._stopped = threading.Event()

    def call(
        self, command: Sequence[str | Path], folder: Path, environment: Mapping[str, str], log: IO[str] | None
    ) -> int:
        self.check()
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
        self._running.append(process)
        if self._stopped.is_set():  # while it was being started
            process.terminate()
        status = process.wait()
        self.check()
        return status

    def check(self) -> None:
        if self._stopped.is_set():
            raise Stopped

    def handle_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:  # nohup
                continue
            signal.signal(number, lambda *_: self.stop())

    def stop(self) -> None:
        """Have those that run end, and start no other. `timeout` sends its signal twice: the second is not passed on,
        since it would cut off what a stage does about the first."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        for process in self._running:
            process.terminate()
        last = threading.Timer(interrupts.SECONDS_TO_STOP, self._kill)
        last.daemon = True
        last.start()

    def _kill(self) -> None:
        for process in self._running:
            process.kill()


def run(
    folder: Path, seed: int, recipe: Mapping[str, Any], processes: Processes, *, node: bool, until: str | None = None
) -> None:
    """The pipeline in a copy of the project, with this checkout's environment; on a node, up to the stage `until`."""
    prepare(folder, seed, recipe, node=node)
    environment = {**os.environ, "PYTHONPATH": f"{folder / 'src'}:{folder}:{os.environ.get('PYTHONPATH', '')}"}
    if not node:  # DVC knows what is done
        if status := processes.call([folder / ".venv/bin/nightshift", "run"], folder, environment, None):
            raise Failed(f"nightshift run in {folder} ended with {status}")
        return
    environment[packages.AS_COMPUTE_NODE] = "1"
    stages = up_to(until, stale(Session(folder)), folder)
    if "choose" in stages:  # what it writes decides whether training stages are stale
        run_stages(folder, ["choose"], environment, processes)
        stages = up_to(until, stale(Session(folder)), folder)
    if stages:
        run_stages(folder, stages, environment, processes)


def up_to(until: str | None, stages: Sequence[str], folder: Path) -> list[str]:
    """Those of the stages that are not after `until` in dvc.yaml."""
    order = list(graph.load(folder))
    if until is not None and until not in order:
        raise Failed(f"the copy {folder} has no stage {until}: its code is older; name another folder for a new copy")
    return [stage for stage in stages if until is None or order.index(stage) <= order.index(until)]


def run_stages(folder: Path, stages: Sequence[str], environment: Mapping[str, str], processes: Processes) -> None:
    path = folder / "log"
    with path.open("a") as log:
        status = processes.call([sys.executable, "-m", "nightshift", "stage", *stages], folder, environment, log)
    if status:
        last = "\n".join(path.read_text(errors="replace").splitlines()[-LINES_SHOWN:])
        raise Failed(f"{last}\nnightshift stage {' '.join(stages)} ended with {status}; all that it wrote is in {path}")


def prepare(folder: Path, seed: int, recipe: Mapping[str, Any], *, node: bool) -> None:
    """A copy of the project, with the recipe and the seed in its params.yaml. Results of another node may be there."""
    if not (folder / paths.DVC_YAML).exists():
        (_copy if node else _clone)(folder)
    content = config.merged(yaml.safe_load((PROJECT / paths.PARAMS).read_text()), {**recipe, "seed": seed})
    (folder / paths.PARAMS).write_text(yaml.safe_dump(content, sort_keys=False))


def with_settings(recipe: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """The recipe with other numbers, each given as "sft.steps=100"."""
    for setting in settings:
        name, _, value = setting.partition("=")
        change = yaml.safe_load(value)
        for part in reversed(name.split(".")):
            change = {part: change}
        recipe = config.merged(recipe, change)
    return dict(recipe)


def _clone(folder: Path) -> None:
    subprocess.run(["git", "clone", "-q", PROJECT, folder], check=True)
    (folder / ".venv").symlink_to(PROJECT / ".venv")


def _copy(folder: Path) -> None:
    files.write_bytes(folder / paths.COPIED_COMMIT, f"{repository.commit(PROJECT)}\n".encode())
    for path in COPIED:
        source, target = PROJECT / path, folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target, dirs_exist_ok=True) if source.is_dir() else shutil.copy2(source, target)


def row(seed: int, clone: dict[str, Any], trained: dict[str, Any], kept: int | str) -> str:
    gain = trained["gain"]
    before, after = _rate(clone["overall"]), _rate(trained["overall"])
    if tables.same_policy_as(trained) == clone["name"]:
        counts, points = "–", "the same policy"
    else:
        counts, points = f"{gain['won']}, {gain['lost']}", _points(gain["gain"], gain["low"], gain["high"])
    return f"| {seed} | {before} | {trained['name']} | {after} | {counts} | {points} | {kept} |\n"


def row_of_clone(seed: int, clone: dict[str, Any]) -> str:
    return f"| {seed} | {_rate(clone['overall'])} | – | – | – | – | – |\n"


def summary(name: str, gains: Sequence[float]) -> str:
    if len(gains) == 1:
        return ""
    return f"\nMean gain of {name} over {len(gains)} seeds, in points: {_points(mean(gains), *of_mean(gains))}\n"


def _points(gain: float, low: float, high: float) -> str:
    return f"{100 * gain:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


def _rate(overall: dict[str, Any]) -> str:
    low, high = 100 * overall["low"], 100 * overall["high"]
    return f"{100 * overall['rate']:.1f} % ({low:.1f} to {high:.1f})"


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Of the command line, or of these words."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the copies, one per seed")
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--recipe", type=Path, help="what differs from params.yaml")
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="as in env.suite=libero_spatial"
    )
    parser.add_argument("--node", action="store_true", help="run stages alone, and leave receipts")
    parser.add_argument("--until", choices=list(graph.load(PROJECT)), help="with --node: run no stage after this one")
    parser.add_argument("--jobs", type=int, default=1, help="seeds that run side by side")
    chosen = parser.parse_args(words)
    if chosen.until and not chosen.node:
        parser.error("--until needs --node; without it, `nightshift run` runs all stages")
    return chosen


def chosen_recipe(chosen: argparse.Namespace) -> dict[str, Any]:
    return with_settings(yaml.safe_load(chosen.recipe.read_text()) if chosen.recipe else {}, chosen.set)


def main() -> None:
    chosen = arguments()
    recipe = chosen_recipe(chosen)
    folders = {seed: chosen.folder.absolute() / str(seed) for seed in chosen.seeds}
    processes = Processes()
    processes.handle_signals()
    try:
        failed = run_all(folders, recipe, processes, node=chosen.node, jobs=chosen.jobs, until=chosen.until)
    except Stopped:
        sys.stderr.write("stopped; the same command goes on\n")
        sys.exit(128 + signal.SIGINT)  # as the command nightshift does
    if chosen.until is None:
        report(folders, failed)
    if failed:
        sys.exit("\n".join(f"seed {seed}: {error}" for seed, error in failed.items()))


def run_all(
    folders: Mapping[int, Path],
    recipe: Mapping[str, Any],
    processes: Processes,
    *,
    node: bool,
    jobs: int,
    until: str | None = None,
) -> dict[int, Exception]:
    """The seeds that failed; the others are run all the same."""
    failed: dict[int, Exception] = {}

    def run_one(seed: int) -> None:
        processes.check()
        try:
            run(folders[seed], seed, recipe, processes, node=node, until=until)
        except (Failed, NightshiftError, OSError, subprocess.CalledProcessError) as error:
            failed[seed] = error

    with ThreadPoolExecutor(jobs) as executor:
        list(executor.map(run_one, folders))
    return {seed: failed[seed] for seed in folders if seed in failed}


def report(folders: Mapping[int, Path], failed: Collection[int] = ()) -> None:
    """A row per seed and training stage, and the mean gain of each stage."""
    sys.stdout.write(HEADER)
    gains: dict[str, list[float]] = defaultdict(list)
    for seed, folder in folders.items():
        if seed in failed:
            sys.stdout.write(f"| {seed} | failed | – | – | – | – | – |\n")
            continue
        clone, *others = json.loads((folder / paths.EVALUATION_REPORT).read_text())["candidates"]
        if not others:
            sys.stdout.write(row_of_clone(seed, clone))
        for trained in others:
            found = history.read(folder / paths.MODELS / trained["name"])
            gains[trained["name"]].append(trained["gain"]["gain"])
            sys.stdout.write(row(seed, clone, trained, found.kept if found else "–"))
    for name, values in gains.items():
        sys.stdout.write(summary(name, values))


if __name__ == "__main__":
    main()
