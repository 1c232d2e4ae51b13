"""What running costs beside simulation and learning, in a clone of this repository. Goals are for quiet cores.

outside   share of a run in which no stage that simulates or learns was at work (WORK, below)
help      seconds of `nightshift --help`; goal 0.5
plan      seconds of `nightshift plan` with nothing to do; goal 1.5
stale     the same in a new clone, where every stage is stale, so that params and machine are checked; goal 1.5
nothing   seconds of `nightshift run` with nothing to do / of a bare `dvc status`, measured in turn; goal 3

One JSON line per name: median, min and max of the rounds, and the same for ratios. A busy machine changes seconds a lot
and ratios hardly, so `in_dvc_status` gives every command in units of the `dvc status` beside it, too; `cpu_seconds` are
those of the command and its children, which on quiet cores are about the seconds of the clock.
`--small` makes the run short (the suite fake, small numbers): its share says nothing, the other figures are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from nightshift.config import merged
from nightshift.pipeline.run import timings

REPOSITORY = Path(__file__).parent.parent
WORK = ("states", "collect", "sft", "rloo", "rlpd", "evaluate")
"""Stages that simulate or learn; starting simulators and Ray for them counts as theirs."""
SERVERS = ("MLFLOW_", "PREFECT_", "RAY_ADDRESS")
"""Prefixes of the environment variables that name servers and clusters."""
NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
"""With it every command would compile the modules of the clone again."""
NIGHTSHIFT = (sys.executable, "-m", "nightshift")
DVC = (str(Path(sys.executable).parent / "dvc"), "status", "-q")
STALE = "stale"
COMMANDS: dict[str, tuple[Sequence[str], float]] = {
    "help": ((*NIGHTSHIFT, "--help"), 0.5),
    "plan": ((*NIGHTSHIFT, "plan"), 1.5),
    STALE: ((*NIGHTSHIFT, "plan"), 1.5),
    "nothing": ((*NIGHTSHIFT, "run"), 3.0),
}
"""Command and goal: seconds, or for `nothing` the ratio."""
SMALL: dict[str, Any] = {
    "machine": {"workers": 0},
    "env": {"suite": "fake", "tasks": [], "horizon": 12},
    "states": {"validation_share": 0.06},
    "collect": {"demos_per_task": 4, "disturbance": 0.0},
    "sft": {"steps": 20, "batch_size": 32},
    "policy": {"inputs": ["objects", "task"], "hidden": [16], "chunk": 1},
    "rloo": {"iterations": 1, "groups": 2, "group_size": 4},
    "evaluate": {"init_states": 4, "films": 0},
}


def clone(folder: Path, *, small: bool) -> Path:
    """What is committed here, in a folder of its own."""
    subprocess.run(["git", "clone", "-q", "--local", str(REPOSITORY), str(folder)], check=True)
    (folder / ".venv").symlink_to(sys.prefix)
    if small:
        params = yaml.safe_load((folder / "params.yaml").read_text())
        (folder / "params.yaml").write_text(yaml.safe_dump(merged(params, SMALL)))
    return folder


def environment(root: Path) -> dict[str, str]:
    """With the code of the clone, and without the servers and the cluster that a user's environment names: nothing of
    the clone belongs into their registry."""
    own = {name: value for name, value in os.environ.items() if not name.startswith((*SERVERS, NO_BYTECODE))}
    return {**own, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}


class Cost(NamedTuple):
    seconds: float
    """Of the wall clock."""
    cpu_seconds: float
    """Of the command and its children."""


def cost(root: Path, command: Sequence[str]) -> Cost:
    began, cpu_before = time.perf_counter(), _cpu_seconds()
    done = subprocess.run(command, cwd=root, env=environment(root), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return Cost(time.perf_counter() - began, _cpu_seconds() - cpu_before)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def outside(root: Path) -> dict[str, Any]:
    """The first run, of every stage."""
    total = cost(root, (*NIGHTSHIFT, "run")).seconds
    stages = timings(root)
    work = sum(stages.get(stage, 0.0) for stage in WORK)
    return {"name": "outside", "share": round(1 - work / total, 3), "seconds": round(total, 1), "stages": dict(stages)}


def commands(root: Path, new: Path, rounds: int) -> list[dict[str, Any]]:
    """Each beside a bare `dvc status` in every round, so that both meet the same load; the first round is not counted:
    it compiles and fills caches. `new` is a clone in which nothing has run."""
    folders = {name: new if name == STALE else root for name in COMMANDS}
    measured = [
        {"dvc": cost(root, DVC), **{name: cost(folders[name], command) for name, (command, _) in COMMANDS.items()}}
        for _ in range(rounds + 1)
    ][1:]
    return [
        {
            "name": name,
            "goal": goal,
            "seconds": _spread([one[name].seconds for one in measured]),
            "cpu_seconds": _spread([one[name].cpu_seconds for one in measured]),
            "in_dvc_status": _spread([one[name].seconds / one["dvc"].seconds for one in measured]),
            "in_dvc_status_cpu": _spread([one[name].cpu_seconds / one["dvc"].cpu_seconds for one in measured]),
        }
        for name, (_, goal) in COMMANDS.items()
    ]


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 2),
        "min": round(min(values), 2),
        "max": round(max(values), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a run of seconds in place of one of minutes")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="overhead-"))
    try:
        root = clone(folder / "project", small=options.small)
        print(json.dumps(outside(root)), flush=True)
        new = clone(folder / "new", small=options.small)
        for figure in commands(root, new, options.rounds):
            print(json.dumps(figure), flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
