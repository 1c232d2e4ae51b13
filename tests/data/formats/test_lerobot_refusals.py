"""LeRobot datasets that contradict themselves, claim too much or lead elsewhere."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from nightshift import files
from nightshift.data.episode import Episode
from nightshift.data.formats import lerobot
from nightshift.data.formats.lerobot import images, layout, parquet_pages
from nightshift.data.limits import Limits
from nightshift.errors import DataError
from tests.data import examples
from tests.data.formats.test_lerobot import THEIRS

DATA = "data/chunk-000/file-000.parquet"
EPISODES = "meta/episodes/chunk-000/file-000.parquet"
TOP = "observation.images.top"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A dataset of two episodes, 3 and 4 frames, made with LeRobot's own API."""
    with tarfile.open(THEIRS) as archive:
        files.extract(archive, tmp_path)
    return tmp_path / "theirs_images"


def load(root: Path) -> list[Episode]:
    return [entry.load() for entry in lerobot.list_episodes(root, "")]


def outcomes(root: Path) -> list[int | str]:
    """The length of each episode, or why it is refused."""
    found: list[int | str] = []
    for entry in lerobot.list_episodes(root, ""):
        try:
            found.append(entry.load().length)
        except DataError as error:
            found.append(error.what)
    return found


def edit(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    info = json.loads((root / layout.INFO).read_text())
    change(info)
    (root / layout.INFO).write_text(json.dumps(info))


def rewrite(root: Path, name: str, column: str, values: Any) -> None:
    """Replace a column of a Parquet file; `values` is given the old column."""
    table = pq.read_table(root / name)
    place = table.column_names.index(column)
    pq.write_table(table.set_column(place, column, values(table[column])), root / name, row_group_size=3)


def test_a_download_of_the_hugging_face_hub_is_read(root: Path, tmp_path: Path) -> None:
    """Its snapshot consists of links into a folder of blobs."""
    snapshot = tmp_path / "datasets--lerobot--push/snapshots/3f2a"
    blobs = tmp_path / "datasets--lerobot--push/blobs"
    blobs.mkdir(parents=True)
    for number, file in enumerate(sorted(path for path in root.rglob("*") if path.is_file())):
        shutil.copyfile(file, blobs / f"{number:040d}")
        link = snapshot / file.relative_to(root)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path(*[".."] * (len(link.relative_to(snapshot).parts) + 1), "blobs", f"{number:040d}"))
    for linked, plain in zip(load(snapshot), load(root), strict=True):
        np.testing.assert_array_equal(linked.observations["top"], plain.observations["top"])
        np.testing.assert_array_equal(linked.actions, plain.actions)


@pytest.mark.parametrize("name", [str(layout.INFO), EPISODES, DATA])
def test_a_link_out_of_the_dataset_is_refused(root: Path, tmp_path: Path, name: str) -> None:
    shutil.move(root / name, tmp_path / "secret")
    (root / name).symlink_to(tmp_path / "secret")
    with pytest.raises(DataError, match=f"{name} is refused: it is a link to .*secret, which is outside of"):
        load(root)


def test_a_list_shorter_than_its_total_is_refused_and_the_rest_can_be_read(root: Path) -> None:
    table = pq.read_table(root / EPISODES)
    pq.write_table(table.slice(1), root / EPISODES)
    first, second = outcomes(root)
    assert first == 5
    assert "meta lists 1 of 2 episodes; the first that is missing is 0" in str(second)
    edit(root, lambda info: info.update(total_episodes=10**15))
    assert "lists 1 of 1000000000000000 episodes" in str(outcomes(root)[-1])


def test_a_list_longer_than_its_total_is_refused(root: Path) -> None:
    edit(root, lambda info: info.update(total_episodes=1))
    assert "meta lists 2 of 1 episodes" in str(outcomes(root)[-1])


def test_a_repeated_episode_index_is_refused_and_the_rest_can_be_read(root: Path) -> None:
    table = pq.read_table(root / EPISODES)
    pq.write_table(pa.concat_tables([table, table.slice(1)]), root / EPISODES)
    first, second = outcomes(root)
    assert first == 4
    assert "meta lists episode 1 more than once" in str(second)


def test_one_damaged_list_of_many_leaves_the_others(root: Path) -> None:
    (root / "meta/episodes/chunk-000/file-001.parquet").write_bytes(b"PAR1 nothing PAR1")
    *rest, broken = outcomes(root)
    assert rest == [4, 5]
    assert "file-001.parquet is damaged or has another layout" in str(broken)


@pytest.mark.parametrize("number", [-1, None], ids=str)
def test_an_episode_index_is_a_natural_number(root: Path, number: Any) -> None:
    rewrite(root, EPISODES, "episode_index", lambda _: pa.array([0, number], pa.int64()))
    first, second, third = outcomes(root)
    assert first == 4
    assert f"row 1: episode_index is {number!r}, not a whole number" in str(second)
    assert "lists 1 of 2 episodes" in str(third)


@pytest.mark.parametrize("length", [0, -3, 5, 10**15])
def test_a_length_is_the_number_of_frames(root: Path, length: int) -> None:
    rewrite(root, EPISODES, "length", lambda _: pa.array([3, length]))
    first, second = outcomes(root)
    assert first == 4
    said = "episode 1: its length is" if length < 1 else "would unpack" if length > 10**9 else "has 4 of its 5 frames"
    assert said in str(second)


def ragged(_: Any) -> pa.Array:
    return pa.array([[1.0, 2], [3.0], [4.0, 5, 6], *[[1.0, 2]] * 4], pa.list_(pa.float32()))


def test_ragged_rows_are_refused_with_their_step(root: Path) -> None:
    """Seven rows of 2, 1, 3, 2, ... numbers would fill [7, 2] and mix the steps."""
    rewrite(root, DATA, "action", ragged)
    first, second = outcomes(root)
    assert "episode 0: action is ragged: its lists have 2 entries, and 1 at step 1" in str(first)
    assert second == 5


def test_ragged_rows_inside_a_matrix_are_refused_with_their_step(root: Path) -> None:
    rows = [[[1.0, 2], [3, 4]]] * 4 + [[[1.0], [2, 3, 4]]] + [[[1.0, 2], [3, 4]]] * 2
    rewrite(root, DATA, "observation.grid", lambda _: pa.array(rows, pa.list_(pa.list_(pa.float64()))))
    assert "episode 1: observation.grid is ragged: its lists have 2 entries, and 1 at step 1" in str(outcomes(root)[1])


def test_rows_without_a_value_are_refused(root: Path) -> None:
    rewrite(root, DATA, "action", lambda old: pa.array([None, *old.to_pylist()[1:]], pa.list_(pa.float32())))
    assert "episode 0: action is ragged" in str(outcomes(root)[0])
    rewrite(root, DATA, "next.reward", lambda old: pa.array([None, *old.to_pylist()[1:]], pa.float32()))
    rewrite(root, DATA, "action", lambda _: pa.array([[0.0, 0.0]] * 7, pa.list_(pa.float32())))
    assert "episode 0: next.reward has 1 empty values" in str(outcomes(root)[0])


@pytest.mark.parametrize("shape", [[-1], [2, -1], [0], [], "2", [2.0], [True], None], ids=str)
def test_a_shape_is_a_list_of_positive_numbers(root: Path, shape: Any) -> None:
    edit(root, lambda info: info["features"]["action"].update(shape=shape))
    if shape == []:
        assert "episode 0: action has rows of shape [2], but [] is declared" in str(outcomes(root)[0])
        return
    with pytest.raises(DataError, match=r"info\.json declares action as 'float32' of shape .* positive numbers"):
        lerobot.list_episodes(root, "")


@pytest.mark.parametrize("shape", [[3], [1, 2], [2, 1], [4]], ids=str)
def test_a_shape_other_than_declared_is_refused(root: Path, shape: list[int]) -> None:
    edit(root, lambda info: info["features"]["action"].update(shape=shape))
    if np.prod(shape) == 2:
        assert "actions are [N, A]" in str(outcomes(root)[0])
    else:
        assert f"episode 0: action has rows of shape [2], but {shape} is declared" in str(outcomes(root)[0])


def test_a_dtype_other_than_declared_is_refused(root: Path) -> None:
    edit(root, lambda info: info["features"]["observation.state"].update(dtype="float64"))
    assert "episode 0: observation.state is float32, but float64 is declared" in str(outcomes(root)[0])


def png(height: int, width: int, mode: str = "RGB") -> bytes:
    stream = io.BytesIO()
    Image.new(mode, (width, height)).save(stream, "PNG")
    return stream.getvalue()


def with_picture(root: Path, content: bytes) -> None:
    """Put this picture into the second frame of the second episode."""
    rewrite(
        root,
        DATA,
        TOP,
        lambda old: pa.array(
            [entry if place != 4 else {"bytes": content, "path": None} for place, entry in enumerate(old.to_pylist())],
            old.type,
        ),
    )


@pytest.mark.parametrize(
    ("content", "found"),
    [(png(16, 32), "[16, 32, 3]"), (png(32, 32, "RGBA"), "[32, 32, 4]"), (png(9000, 9000, "1"), "[9000, 9000, 1]")],
    ids=["size", "channels", "bomb"],
)
def test_a_picture_of_another_size_than_declared_is_refused_undecoded(root: Path, content: bytes, found: str) -> None:
    with_picture(root, content)
    first, second = outcomes(root)
    assert first == 4
    assert f"episode 1: {TOP}, step 1 has images of {found}, but [32, 32, 3] is declared" in str(second)


def test_a_picture_that_starts_a_program_is_not_opened(root: Path) -> None:
    """PIL runs Ghostscript on PostScript."""
    with_picture(root, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n%%EndComments\n")
    assert f"{TOP}, step 1 is not a readable image" in str(outcomes(root)[1])


def test_pictures_declared_channels_first_are_read_channels_last(root: Path) -> None:
    declared = {"shape": [3, 32, 32], "names": ["channels", "height", "width"]}
    edit(root, lambda info: info["features"][TOP].update(declared))
    assert load(root)[0].observations["top"].shape == (4, 32, 32, 3)


def test_a_video_of_another_size_than_declared_is_refused(tmp_path: Path) -> None:
    lerobot.write(tmp_path / "new", [examples.with_images(size=16)], videos=True)
    shutil.rmtree(tmp_path / "new/nightshift")
    name = "observation.images.front"
    edit(tmp_path / "new", lambda info: info["features"][name].update(shape=[32, 32, 3]))
    assert f"{name} has images of [16, 16, 3], but [32, 32, 3] is declared" in str(outcomes(tmp_path / "new")[0])


def test_a_playlist_in_the_place_of_a_video_is_not_followed(tmp_path: Path) -> None:
    images.write_video(tmp_path / "secret.mp4", np.zeros((3, 16, 16, 3), np.uint8), 10)
    video = tmp_path / "film.mp4"
    video.write_text(f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile://{tmp_path}/secret.mp4\n#EXT-X-ENDLIST\n")
    with pytest.raises(DataError, match=r"the video .*film\.mp4 is not readable"):
        images.read_video(video, [0.0], 10, (16, 16, 3), "here")


@pytest.mark.parametrize("template", ["{chunk_index:1000000000d}", "{chunk_index.__class__}", "{0}", "{", 7], ids=str)
def test_a_template_of_paths_holds_numbers_only(root: Path, template: Any) -> None:
    edit(root, lambda info: info.update(data_path=template))
    assert "theirs_images, episode 0 is damaged" in str(outcomes(root)[0])


def write_frames(root: Path, columns: dict[str, Any], features: dict[str, Any], frames: int) -> Path:
    """Replace the frames of the dataset by these columns, all of episode 0."""
    integers = {name: np.zeros(frames, np.int64) for name in ("episode_index", "index", "task_index")}
    rest = {**integers, "frame_index": np.arange(frames), "timestamp": np.zeros(frames, np.float32)}
    pq.write_table(pa.table({**columns, **rest}), root / DATA, compression="zstd")
    counters = {name: {"dtype": dtype, "shape": [1]} for name, dtype in layout.COUNTERS.items()}
    edit(root, lambda info: info.update(features={**features, **counters}))
    rewrite(root, EPISODES, "length", lambda _: pa.array([frames, frames]))
    return root / DATA


def test_what_a_table_unpacks_to_is_checked_before_it_is_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """222 kB once gave 1.1 GB: run lengths of one number. Here a tenth of that, with a tenth of the limit."""
    zeros = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(28_000 * 1000, np.float32)), 1000)
    path = write_frames(root, {"action": zeros}, {"action": {"dtype": "float32", "shape": [1000]}}, 28_000)
    assert path.stat().st_size < 200_000
    entry = lerobot.list_episodes(root, "", Limits(floor=50 * 10**6, ceiling=10**9))[0]
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(DataError, match=r"file-000\.parquet would unpack from .* kB to 11\d\.\d MB"):
        entry.load()


def test_one_picture_repeated_by_a_dictionary_is_bounded_while_it_is_read(root: Path) -> None:
    """The dictionary holds the picture once, so neither the footer nor a page says how often it is unpacked."""
    noise = np.random.default_rng(0).integers(0, 256, (200, 200, 3), np.uint8)
    content, frames = images.to_png(noise), 200
    shown = {TOP: pa.array([{"bytes": content, "path": None}] * frames)}
    vectors = {"action": pa.array([[0.0]] * frames, pa.list_(pa.float32()))}
    features = {TOP: {"dtype": "image", "shape": [1, 1, 3]}, "action": {"dtype": "float32", "shape": [1]}}
    path = write_frames(root, {**shown, **vectors}, features, frames)
    assert path.stat().st_size < 2 * len(content)
    with pq.ParquetFile(path) as file:
        measured = parquet_pages.measure(path, file.metadata, [TOP], [0])
    assert measured.total < 2 * len(content) < 2 * measured.dictionary
    entry = lerobot.list_episodes(root, "", Limits(floor=10**6, ceiling=10**7))[0]
    with pytest.raises(DataError, match=r"file-000\.parquet would unpack from .* kB to 1\d\.\d MB"):
        entry.load()


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "zstd"])
def test_page_headers_bound_what_arrow_reads(tmp_path: Path, version: str, compression: str) -> None:
    random = np.random.default_rng(0)
    table = pa.table(
        {
            "constant": np.zeros(20_000),
            "noise.x": random.standard_normal(20_000),
            "flags": random.random(20_000) < 0.5,
            "vectors": pa.array([[1.0, 2.0]] * 20_000, pa.list_(pa.float32())),
            "words": pa.array([f"{n}" * 3 for n in range(20_000)]),
            "gone": pa.array([None] * 20_000, pa.int64()),
        }
    )
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, compression=compression, data_page_version=version, row_group_size=7000)
    with pq.ParquetFile(path) as file:
        for name in table.column_names:
            measured = parquet_pages.measure(path, file.metadata, [name], range(3))
            assert table[name].nbytes <= measured.total <= 4 * table[name].nbytes + 200_000
            assert 0 < measured.stored <= path.stat().st_size
