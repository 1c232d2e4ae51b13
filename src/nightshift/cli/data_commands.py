"""The commands on episodes: import from other formats, export, statistics."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.text import Text

from nightshift.cli.commands import enter
from nightshift.data import dataset_store, formats, limits
from nightshift.data.episode import Episode
from nightshift.data.limits import Limits
from nightshift.errors import DataError
from nightshift.project import paths
from nightshift.telemetry import progress
from nightshift.telemetry.console import console

SPLITS = ("all", *dataset_store.SPLITS)
_ADMITTED = {
    formats.REPEATED_FINAL: "the source has no observation after the last action: the one before it stands in",
    formats.OBSERVATIONS_SHIFTED: "the source shows what each action led to: every observation is moved to "
    "the action that follows it, and the first action is left out",
    formats.SUCCESS_ASSUMED: "the source has no rewards: they count as demonstrations that succeeded",
    formats.STARTS_MID_EPISODE: "they start in the middle of an episode",
    formats.ENDS_MID_EPISODE: "they end in the middle of an episode",
}
"""Words for what episodes say of themselves in their metadata."""


def import_episodes(
    path: Path, format: str, name: str, task: str, *, skip_broken: bool, max_episode_gb: float | None = None
) -> None:
    """A source in another format as data/imports/NAME, tracked by DVC."""
    from nightshift.adapters.dvc_store import PATIENCE_SECONDS, DvcStore
    from nightshift.data import importing

    path = Path(os.path.abspath(path))
    root = enter()
    allowed = limits.DEFAULT if max_episode_gb is None else Limits.of_gigabytes(max_episode_gb)
    job = importing.Import(path=path, format=format, name=name, task=task, limits=allowed)
    with importing.alone(job):
        state = importing.begin(job)
        if state.done:
            console.print(f"resuming: {state.done} of {len(state.entries)} episodes are already imported")
        with progress.bar("import", len(state.entries), state.done) as advance:
            importing.gather(job, state, skip_broken=skip_broken, watch=advance)
        admitted = importing.finish(job, state)
    console.print(f"[bold]{job.target}[/]: {_episodes(len(state.kept))}")
    pointer = DvcStore(root, patience=PATIENCE_SECONDS).track(job.target)
    for reason, count in state.left_out.items():
        console.print(f"left out: {_episodes(count)} {reason}")
    for sentence in state.broken.values():
        console.print(Text(f"  {sentence}", style="dim"), soft_wrap=True)
    for mark, words in _ADMITTED.items():
        if mark in admitted:
            console.print(f"[dim]{_episodes(admitted[mark])}: {words}[/]", soft_wrap=True)
    console.print("to train on it, write in params.yaml under dataset:")
    console.print(Text(f"  sources: [{name}]", style="cyan"))
    console.print("to share it with every clone (dvc push, dvc pull):")
    console.print(Text(f"  git add {pointer}", style="cyan"))


def export(path: Path, format: str, split: str, *, video: bool) -> None:
    """The dataset as a new folder in another format."""
    path = Path(os.path.abspath(path))
    enter()
    if split not in SPLITS:
        raise DataError(f"there is no split {split!r}", f"use one of {', '.join(SPLITS)}")
    if video and format != "lerobot":
        raise DataError(f"{format} has no films", "leave out --video")
    if path.exists():
        raise DataError(f"{path} already exists", "name a new folder")
    writer = formats.writer(format)
    episodes = list(_dataset(split))
    with progress.bar("export", len(episodes)) as advance:
        watched = _watched(episodes, advance)
        if video:
            from nightshift.data.formats import lerobot

            lerobot.write(path, watched, videos=True)
        else:
            writer.write(path, watched)
    console.print(Text.assemble((str(path), "bold"), f": {_episodes(len(episodes))}"), soft_wrap=True)


def stats(source: str, plot: Path | None) -> None:
    """What the dataset, an import or the demos are like, in numbers and histograms."""
    from nightshift.cli import dataset_view
    from nightshift.data import sources, statistics

    plot = None if plot is None else Path(os.path.abspath(plot))
    if plot is not None and (plot.suffix != ".png" or not plot.parent.is_dir()):
        raise DataError(f"{plot} cannot be drawn", "name a file that ends in .png, in a folder that exists")
    enter()
    found = statistics.compute(sources.open_store(source) if source else _dataset("all"))
    title = source or str(paths.DATASET)
    console.print(dataset_view.render(title, found))
    if plot is not None:
        dataset_view.draw(plot, title, found)
        console.print(Text.assemble(("\npicture  ", "dim"), str(plot)), soft_wrap=True)


def _dataset(split: str) -> Iterator[Episode]:
    if not paths.DATASET.exists():
        raise DataError(f"there is no {paths.DATASET} yet", "nightshift run")
    dataset = dataset_store.read(paths.DATASET)
    for part in dataset_store.SPLITS:
        if split in ("all", part):
            yield from dataset.episodes(part)


def _watched(episodes: Iterable[Episode], advance: progress.Advance) -> Iterator[Episode]:
    for episode in episodes:
        yield episode
        advance("")


def _episodes(count: int) -> str:
    return "1 episode" if count == 1 else f"{count} episodes"
