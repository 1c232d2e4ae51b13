"""Whatever happens to a file of any format: only NightshiftError comes out, and --skip-broken goes on with the rest."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nightshift import files
from nightshift.data import importing, limits
from nightshift.data.episode_store import EpisodeStore
from nightshift.data.formats import lerobot, reader, rlds_tfrecord
from nightshift.data.formats.lerobot import layout
from nightshift.data.limits import Limits
from nightshift.errors import DataError, NightshiftError
from nightshift.project import paths
from tests.data import examples
from tests.data.formats.hdf5_files import libero_demo, robomimic_demo, write_libero, write_robomimic
from tests.data.formats.test_hil_serl import run_of


def hdf5(folder: Path) -> None:
    folder.mkdir()
    for number in range(3):
        write_libero(folder / f"{number}.hdf5", {"demo_0": libero_demo(steps=2, seed=number, size=2)})


def hil_serl(folder: Path) -> None:
    folder.mkdir()
    for number in range(3):
        (folder / f"transitions_{number}.pkl").write_bytes(pickle.dumps(run_of(2, first=10 * number)))


def rlds(folder: Path) -> None:
    rlds_tfrecord.write(folder, [examples.make(seed=seed) for seed in range(3)], shard_bytes=1)


def lerobot_(folder: Path) -> None:
    """Without the checksums of our own exports, as anybody writes it."""
    lerobot.write(folder, [examples.with_images(seed=seed, steps=3) for seed in range(3)])
    shutil.rmtree(folder / layout.SIDECAR_FOLDER)


def lerobot_export(folder: Path) -> None:
    lerobot.write(folder, [examples.make(seed=seed, steps=3) for seed in range(3)])


WRITERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "hdf5": ("hdf5", hdf5),
    "hil-serl": ("hil-serl", hil_serl),
    "rlds": ("rlds", rlds),
    "lerobot": ("lerobot", lerobot_),
    "export": ("lerobot", lerobot_export),
}
TASKS = {"hdf5": "", "hil-serl": "insert_ram", "rlds": "", "lerobot": ""}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sources")
    for name, (_, write) in WRITERS.items():
        write(root / name)
    return root


def lengths(path: Path, format: str) -> list[int]:
    """The lengths of the episodes that can be read; every error must be a sentence with the next step."""
    found = []
    try:
        entries = reader(format).list_episodes(path, TASKS[format])
    except NightshiftError as error:
        assert str(path) in error.what and error.next_step
        return []
    for entry in entries:
        try:
            found.append(entry.load().length)
        except NightshiftError as error:
            assert path.name in error.what
    return found


@pytest.mark.parametrize("source", WRITERS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(pick=0, cut=0.0, flips=[])
@example(pick=1, cut=0.5, flips=[])
@given(
    pick=st.integers(0, 30),
    cut=st.just(1.0) | st.floats(0, 1),
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), max_size=4),
)
def test_a_damaged_file_gives_episodes_or_nightshift_errors(
    sources: Path,
    tmp_path_factory: pytest.TempPathFactory,
    source: str,
    pick: int,
    cut: float,
    flips: list[tuple[float, int]],
) -> None:
    format, _ = WRITERS[source]
    copy = tmp_path_factory.mktemp("damaged") / source
    shutil.copytree(sources / source, copy)
    victims = sorted(path for path in copy.rglob("*") if path.is_file() and path.name != files.MANIFEST)
    victim = victims[pick % len(victims)]
    content = bytearray(victim.read_bytes()[: int(cut * victim.stat().st_size)])
    for place, change in flips:
        if content:
            content[int(place * len(content))] ^= change
    victim.write_bytes(content)
    lengths(copy, format)
    shutil.rmtree(copy)


@pytest.mark.parametrize("source", ["hdf5", "hil-serl", "rlds"])
@pytest.mark.parametrize("damage", ["cut", "garbage", "link", "folder", "pipe"])
def test_one_broken_file_of_three_leaves_the_episodes_of_the_others(
    sources: Path, tmp_path: Path, source: str, damage: str
) -> None:
    copy = tmp_path / source
    shutil.copytree(sources / source, copy)
    victim = sorted(path for path in copy.rglob("*") if path.suffix != ".json")[1]
    spoil(victim, damage, tmp_path)
    assert len(lengths(copy, source)) == 2


@pytest.mark.parametrize("damage", ["cut", "garbage", "link", "folder", "pipe"])
def test_one_broken_data_file_of_an_export_leaves_the_episodes_of_the_others(tmp_path: Path, damage: str) -> None:
    lerobot_export(tmp_path / "export")
    spoil(tmp_path / "export" / layout.sidecar(1), damage, tmp_path)
    assert len(lengths(tmp_path / "export", "lerobot")) == 2


def spoil(victim: Path, damage: str, elsewhere: Path) -> None:
    content = victim.read_bytes()
    victim.unlink()
    if damage == "link":
        (elsewhere / "secret").write_bytes(content)
        victim.symlink_to(elsewhere / "secret")
    elif damage == "folder":
        victim.mkdir()
    elif damage == "pipe":
        os.mkfifo(victim)
    else:
        victim.write_bytes(content[: len(content) // 2] if damage == "cut" else b"garbage" * 100)


def imported(path: Path, format: str, *, skip_broken: bool) -> tuple[int, dict[str, str]]:
    """Import a source; the number of episodes, and why others were left out."""
    job = importing.Import(path=path, format=format, name="goal", task=TASKS[format])
    with importing.alone(job):
        progress = importing.begin(job)
        importing.gather(job, progress, skip_broken=skip_broken, watch=lambda _: None)
        importing.finish(job, progress)
    return len(EpisodeStore(paths.IMPORTS / "goal").keys()), progress.broken


@pytest.mark.parametrize("source", WRITERS)
def test_skip_broken_imports_the_rest_of_every_format(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    format, _ = WRITERS[source]
    copy = tmp_path / "source"
    shutil.copytree(sources / source, copy)
    monkeypatch.chdir(tmp_path)
    if source in ("lerobot", "export"):
        break_lerobot(copy, source)
    else:
        spoil(sorted(path for path in copy.rglob("*") if path.suffix != ".json")[1], "cut", tmp_path)
    with pytest.raises(DataError) as refusal:
        imported(copy, format, skip_broken=False)
    assert str(copy) in refusal.value.what and "--skip-broken" in refusal.value.next_step
    assert not (tmp_path / paths.IMPORTS / "goal").exists()
    count, broken = imported(copy, format, skip_broken=True)
    assert count == 2 and len(broken) == 1


def break_lerobot(root: Path, source: str) -> None:
    if source == "export":
        (root / layout.sidecar(1)).write_bytes(b"damaged")
        return
    (file,) = (root / layout.EPISODES).rglob("*.parquet")
    table = pq.read_table(file)
    longer = pa.array([2, 5, 2])
    pq.write_table(table.set_column(table.column_names.index("length"), "length", longer), file)


def test_what_the_listing_finds_is_reported_before_anything_is_imported(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "source"
    shutil.copytree(sources / "hdf5", copy)
    (copy / "2.hdf5").write_bytes(b"damaged")
    monkeypatch.chdir(tmp_path)
    job = importing.Import(path=copy, format="hdf5", name="goal")
    progress = importing.begin(job)
    with pytest.raises(DataError, match=r"2\.hdf5 is damaged"):
        importing.gather(job, progress, skip_broken=False, watch=lambda _: None)
    assert not progress.kept


def test_demos_that_share_their_arrays_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hard links let every demo of a small file be the same large one."""
    path = write_robomimic(tmp_path / "lift.hdf5", {"demo_0": robomimic_demo(steps=50, seed=0)}, {})
    with h5py.File(path, "a") as file:
        for number in range(1, 400):
            file[f"data/demo_{number}"] = file["data/demo_0"]
    monkeypatch.chdir(tmp_path)
    job = importing.Import(path=path, format="hdf5", name="goal", limits=Limits(floor=40_000, ceiling=10**9))
    progress = importing.begin(job)
    monkeypatch.setattr(limits, "RATIO", 10)
    with pytest.raises(DataError, match=r"lift\.hdf5 has .* kB and its episodes more than"):
        importing.gather(job, progress, skip_broken=False, watch=lambda _: None)


def test_a_description_that_is_not_json_is_a_data_error(tmp_path: Path) -> None:
    for source, name in (("rlds", rlds_tfrecord.INFO), ("lerobot", str(layout.INFO))):
        WRITERS[source][1](tmp_path / source)
        for content in ("", "[]", "7", '"text"', "{}", "[" * 10**5, json.dumps({"features": [1], "splits": {}})):
            (tmp_path / source / name).write_text(content)
            with pytest.raises(DataError, match=source):
                reader(WRITERS[source][0]).list_episodes(tmp_path / source, "")
