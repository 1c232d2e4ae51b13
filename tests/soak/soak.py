"""Cycles of a disturbed night, the next one, and the checks; the log and the figures of them."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nightshift.project import paths
from tests.command import Command
from tests.soak import invariants
from tests.soak.faults import FAULTS, Fault, Missed
from tests.soak.invariants import Inventory
from tests.soak.night import Ended, Night, how_it_ended, own_disk, set_params, small_project, undisturbed

LOG, FIGURES, TABLE = "soak.log", "soak.json", "soak.md"
OUTPUT = paths.STATE / "disturbed-night.log"
"""What the disturbed run printed; it is kept with a project in which an invariant did not hold."""


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """What one cycle was about and how it went."""

    number: int
    fault: str
    kind: str
    stage: str
    outcome: str
    """How the disturbed run ended: done, stopped, dead, refused or failed; or that the fault was missed."""
    problems: tuple[str, ...]
    """Invariants that did not hold."""
    seconds: float


@dataclass
class Figures:
    seed: int
    cycles: list[Cycle] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    """Folders of projects in which an invariant did not hold."""
    seconds: float = 0.0

    @property
    def failed(self) -> list[Cycle]:
        return [cycle for cycle in self.cycles if cycle.problems]

    def summary(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "minutes": round(self.seconds / 60, 1),
            "cycles": len(self.cycles),
            "failed": len(self.failed),
            "missed": sum(cycle.outcome.startswith("missed") for cycle in self.cycles),
            "faults": dict(Counter(cycle.fault for cycle in self.cycles)),
            "kinds": dict(Counter(cycle.kind for cycle in self.cycles)),
            "outcomes": dict(Counter(cycle.outcome.split(":")[0] for cycle in self.cycles)),
            "kept": self.kept,
            "cycle": [asdict(cycle) for cycle in self.cycles],
        }


def soak(
    folder: Path, *, seed: int, minutes: float, cycles: int = 10**6, faults: tuple[Fault, ...] = FAULTS
) -> Figures:
    """Cycles until the time is over. A project in which an invariant did not hold is kept, and another one is begun."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = Figures(seed)
    _log(folder, f"seed {seed}, {minutes:g} min; not possible here: {[f.name for f in faults if not f.possible()]}")
    reference = small_project(folder / "reference")
    first = small_project(folder / "first")
    play_first_night(first)
    order = in_random_order([fault for fault in faults if fault.possible()], random.Random(seed))
    began = time.monotonic()
    with own_disk(folder / "disk"):
        while figures.seconds < 60 * minutes and len(figures.cycles) < cycles:
            # A new place for a new project: MLflow keeps databases open by their path.
            root = folder / "disk" / f"project-{len(figures.kept) + 1}"
            if not root.exists():
                shutil.copytree(first, root, symlinks=True)
            _record(folder, root, figures, play_cycle(root, reference, next(order), len(figures.cycles) + 1, seed))
            figures.seconds = time.monotonic() - began
            (folder / FIGURES).write_text(json.dumps(figures.summary(), indent=2) + "\n")
            (folder / TABLE).write_text(table(figures.cycles, faults))
    _log(folder, f"{len(figures.cycles)} cycles, {len(figures.failed)} failed; seed {seed}; kept: {figures.kept}")
    return figures


def _record(folder: Path, root: Path, figures: Figures, cycle: Cycle) -> None:
    figures.cycles.append(cycle)
    _log(folder, describe(cycle))
    if cycle.problems:
        kept = folder / f"kept-{cycle.number}"
        shutil.copytree(root, kept, symlinks=True)
        shutil.rmtree(root)
        figures.kept.append(str(kept))


def in_random_order(faults: list[Fault], chance: random.Random) -> Iterator[Fault]:
    """All of them in a random order, then all again in another."""
    while True:
        yield from chance.sample(faults, len(faults))


def play_first_night(root: Path) -> None:
    """A champion to begin with."""
    set_params(root, seed=0, workers=0)
    ended = _command(root, "nightly")
    if ended.code:
        raise RuntimeError(f"the first night failed: {ended.errors}")
    if problems := list(invariants.broken_registry(root)):
        raise RuntimeError(f"the first night has to make a champion: {'; '.join(problems)}")


def play_cycle(root: Path, reference: Path, fault: Fault, number: int, seed: int) -> Cycle:
    """A disturbed night, the next one, and what must hold then."""
    began = time.monotonic()
    chance = random.Random(f"{seed}/{number}")
    before = invariants.take_inventory(root)
    set_params(root, seed=1000 * (seed + 1) + number, workers=fault.workers)
    night = Night(root, chance, fault.environment, chance.choice(fault.stages) if fault.stages else "")
    ended, missed = disturbed_run(night, fault)
    set_params(root, seed=1000 * (seed + 1) + number, workers=0)
    expected = undisturbed(reference, 1000 * (seed + 1) + number)
    problems = [
        *(
            invariants.unfit_next(ended)
            if missed
            else invariants.unfit_end(ended, refused=fault.refused, silent=fault.silent)
        ),
        *check(root, before, expected),
    ]
    return Cycle(
        number=number,
        fault=fault.name,
        kind=fault.kind,
        stage=night.stage,
        outcome=f"missed: {missed}" if missed else outcome(ended),
        problems=tuple(problems),
        seconds=round(time.monotonic() - began, 1),
    )


def disturbed_run(night: Night, fault: Fault) -> tuple[Ended, str]:
    """How it ended, and why the fault did not happen, if it did not; what has to be put right is, then."""
    missed = ""
    with night.undo:
        try:
            if not fault.stages:
                fault.strike(night)
            night.start("nightly")
            if fault.stages:
                _strike(night, fault)
        except Missed as reason:
            missed = str(reason)
            if night.command is None:
                night.start("nightly")
        ended = night.wait()
    (night.root / OUTPUT).write_text(f"{ended.output}\n{ended.errors}\nexit code {ended.code}\n")
    return ended, missed


def _strike(night: Night, fault: Fault) -> None:
    if not night.wait_for_stage():
        raise Missed(f"the run ended before {night.stage}")
    fault.strike(night)


def check(root: Path, before: Inventory, expected: dict[str, bytes]) -> Iterator[str]:
    """The next run, and every invariant."""
    following = _command(root, "nightly")
    yield from invariants.unfit_next(following)
    if following.code:
        return
    yield from invariants.other_weights(root, expected)
    yield from invariants.lost(root, before)
    yield from invariants.broken_registry(root)
    yield from invariants.left_running(root)
    yield from invariants.unfit_prediction(_command(root, "predict", "--episodes", "1"))
    yield from invariants.left_processes(root)
    yield from invariants.left_files(root)


def _command(root: Path, *arguments: str) -> Ended:
    return how_it_ended(Command(root, *arguments))


def outcome(ended: Ended) -> str:
    named = {0: "done", 130: "stopped", -9: "dead"}
    return named.get(ended.code) or f"refused: {ended.sentence}"


def describe(cycle: Cycle) -> str:
    where = f" in {cycle.stage}" if cycle.stage else ""
    words = f"cycle {cycle.number}: {cycle.fault}{where}: {cycle.outcome}, {cycle.seconds:.0f} s"
    return words + "".join(f"\n    NOT HELD: {problem}" for problem in cycle.problems)


def table(cycles: Sequence[Cycle], faults: Sequence[Fault]) -> str:
    """For docs/reliability.md: how often each fault happened, how the disturbed nights ended, and what did not hold."""
    lines = ["| fault | kind | cycles | the disturbed night | failed |", "|---|---|---|---|---|"]
    for fault in faults:
        struck = [cycle for cycle in cycles if cycle.fault == fault.name]
        ended = Counter(cycle.outcome.split(":")[0] for cycle in struck)
        told = ", ".join(f"{outcome} {times}" for outcome, times in ended.items()) or "–"
        failed = sum(bool(cycle.problems) for cycle in struck)
        lines.append(f"| {fault.name} | {fault.kind} | {len(struck)} | {told} | {failed} |")
    return "\n".join(lines) + "\n"


def _log(folder: Path, line: str) -> None:
    stamped = f"{time.strftime('%H:%M:%S')}  {line}"
    with contextlib.suppress(BrokenPipeError):
        print(stamped, flush=True)  # noqa: T201
    with (folder / LOG).open("a") as log:
        log.write(stamped + "\n")
