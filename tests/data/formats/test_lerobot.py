from __future__ import annotations

import io
import json
import random
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from nightshift import files
from nightshift.data.episode import Episode
from nightshift.data.formats import REPEATED_FINAL, SUCCESS_ASSUMED, lerobot
from nightshift.data.formats.lerobot import images, layout, stats
from nightshift.errors import DataError
from tests.data import examples

THEIRS = Path(__file__).parent / "written_by_lerobot_0_4_4.tar.xz"
"""Two datasets of two episodes, 3 and 4 frames at 10 Hz, made with LeRobot's own API: with PNG, and with AV1 videos."""


def load(path: Path, task: str = "") -> list[Episode]:
    return [entry.load() for entry in lerobot.list_episodes(path, task)]


def unusual(steps: int, seed: int) -> Episode:
    """Dtypes and shapes that are not everyday."""
    random = np.random.default_rng(seed)
    made = examples.with_images(steps=steps, seed=seed)
    odd = {
        "grid": random.standard_normal((steps, 2, 3)),
        "depth": random.integers(0, 2**16, (steps, 4, 4, 1), np.uint16),
        "grey": random.integers(0, 2**8, (steps, 4, 4, 1), np.uint8),
        "one": random.standard_normal((steps, 1)).astype(np.float16),
        "scalar": random.integers(-5, 5, steps, np.int16),
        "touches": random.random((steps, 2)) < 0.5,
        "nothing": np.zeros((steps, 0), np.float32),
        "robot/grid": random.standard_normal((steps, 3)).astype(np.float32),
        "images.depth": random.integers(0, 2**16, (steps, 4, 4, 1), np.uint16),
    }
    return replace(
        made,
        observations={**made.observations, **odd},
        actions=made.actions.astype(np.float64) / 3,
        policy_actions=made.policy_actions.astype(np.float64) / 7,
        rewards=made.rewards.astype(np.uint8),
    )


def columns(path: Path) -> dict[str, Any]:
    return pq.read_table(path / "data/chunk-000/file-000.parquet").to_pydict()  # type: ignore[no-any-return]


@settings(deadline=None, max_examples=15)
@given(episodes=st.lists(examples.episodes(min_steps=2), min_size=1, max_size=3))
def test_what_we_write_comes_back_exactly(tmp_path_factory: pytest.TempPathFactory, episodes: list[Episode]) -> None:
    path = tmp_path_factory.mktemp("dataset") / "new"
    lerobot.write(path, episodes)
    for back, made in zip(load(path), episodes, strict=True):
        examples.assert_same(back, made)


def test_unusual_dtypes_and_shapes_come_back_exactly(tmp_path: Path) -> None:
    made = [unusual(4, 0), unusual(7, 1)]
    lerobot.write(tmp_path / "new", made)
    for back, episode in zip(load(tmp_path / "new"), made, strict=True):
        examples.assert_same(back, episode)


def test_frames_are_all_steps_but_the_last(tmp_path: Path) -> None:
    made = [examples.with_images(steps=4, seed=0), examples.with_images(steps=3, seed=1, success=False)]
    lerobot.write(tmp_path / "new", made)
    found = columns(tmp_path / "new")
    np.testing.assert_array_equal(found["action"], np.concatenate([episode.actions[:-1] for episode in made]))
    assert found["frame_index"] == [0, 1, 2, 0, 1]
    assert found["episode_index"] == [0, 0, 0, 1, 1]
    assert found["index"] == [0, 1, 2, 3, 4]
    assert found["next.done"] == [False, False, True, False, True]
    assert found["next.success"] == [False, False, True, False, False]
    assert found["next.reward"] == [0, 0, 1, 0, 1]
    np.testing.assert_allclose(found["timestamp"], [0, 0.05, 0.1, 0, 0.05], rtol=1e-6)
    image = images.from_file(found["observation.images.front"][4]["bytes"], (8, 8, 3), "here")
    np.testing.assert_array_equal(image, made[1].observations["front"][1])


def test_info_episodes_and_statistics_are_what_lerobot_expects(tmp_path: Path) -> None:
    made = [examples.with_images(steps=4, seed=0), examples.with_images(steps=3, seed=1)]
    lerobot.write(tmp_path / "new", made)
    info = json.loads((tmp_path / "new" / layout.INFO).read_text())
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"], info["fps"]) == (2, 5, 1, 20)
    assert info["features"]["observation.images.front"]["shape"] == [8, 8, 3]
    assert info["features"]["action"] == {"dtype": "float32", "shape": [7], "names": None}
    rows = pq.read_table(tmp_path / "new/meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [(row["dataset_from_index"], row["dataset_to_index"]) for row in rows] == [(0, 3), (3, 5)]
    assert [row["tasks"] for row in rows] == [["lift the cube"]] * 2
    found = json.loads((tmp_path / "new" / layout.STATS).read_text())
    actions = np.concatenate([episode.actions[:-1] for episode in made]).astype(np.float64)
    for name, expected in {"mean": actions.mean(0), "std": actions.std(0), "max": actions.max(0)}.items():
        np.testing.assert_allclose(found["action"][name], expected, rtol=1e-6)
    assert found["action"]["count"] == [5]
    assert np.shape(found["observation.images.front"]["mean"]) == (3, 1, 1)


def test_statistics_of_images_are_those_of_their_values() -> None:
    frames = np.random.default_rng(0).integers(3, 250, (5, 6, 7, 3), np.uint8)
    found = stats.of_images(frames)
    values = frames.reshape(-1, 3) / 255
    for name in ("min", "max", "mean", "std"):
        np.testing.assert_allclose(found[name].reshape(3), getattr(values, name)(0), rtol=1e-9)
    np.testing.assert_allclose(found["q50"].reshape(3), np.quantile(values, 0.5, axis=0), atol=1 / 255)


def test_images_are_read_unchanged_or_rejected() -> None:
    depth = np.arange(12, dtype=np.uint16).reshape(3, 4) * 5000
    grey = np.arange(12, dtype=np.uint8).reshape(3, 4)
    for image in (depth, grey):
        stream = io.BytesIO()
        Image.fromarray(image).save(stream, "PNG")
        back = images.from_file(stream.getvalue(), (3, 4, 1), "here")
        assert back.dtype == image.dtype
        np.testing.assert_array_equal(back, image[..., None])
    stream = io.BytesIO()
    Image.fromarray(grey).convert("P").save(stream, "PNG")
    with pytest.raises(DataError, match="here has a palette"):
        images.from_file(stream.getvalue(), (3, 4, 1), "here")


def test_videos_keep_everything_but_the_exact_images(tmp_path: Path) -> None:
    made = [replace(episode, observations=_smooth(episode)) for episode in (examples.make(steps=9), examples.make())]
    lerobot.write(tmp_path / "new", made, videos=True)
    assert "observation.images.front" not in columns(tmp_path / "new")
    for back, episode in zip(load(tmp_path / "new"), made, strict=True):
        difference = np.abs(back.observations["front"].astype(int) - episode.observations["front"])
        assert difference.max() < 12
        examples.assert_same(
            replace(back, observations={**back.observations, "front": episode.observations["front"]}), episode
        )


def _smooth(episode: Episode) -> dict[str, Any]:
    """Grey frames that grow brighter, so that one frame too early or late shows."""
    levels = np.linspace(20, 230, episode.length).astype(np.uint8)
    return {**episode.observations, "front": np.broadcast_to(levels[:, None, None, None], (len(levels), 32, 32, 3))}


def test_videos_of_odd_size_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"observation\.images\.front is 7x7: videos need even sizes"):
        lerobot.write(tmp_path / "new", [examples.with_images(size=7)], videos=True)
    assert not (tmp_path / "new").exists()


def test_episodes_that_differ_from_the_first_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    other = examples.make(seed=1)
    for changed, sentence in (
        (replace(other, actions=other.actions.astype(np.float64)), "action of the episode lift_cube, init state 17"),
        (replace(other, metadata={"fps": 5}), "has 5 steps per second, those before it 20"),
        (replace(other, metadata={"fps": 12.5}), "fps is 12.5 in the metadata"),
        (examples.make(steps=1), "init state 17 has no action"),
    ):
        with pytest.raises(DataError, match=sentence):
            lerobot.write(tmp_path / "new", [examples.make(), changed])
    with pytest.raises(DataError, match="there are no episodes to write"):
        lerobot.write(tmp_path / "new", [])
    assert list(tmp_path.iterdir()) == []


def test_large_datasets_are_spread_over_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "DATA_FILE_MB", 0.01)
    made = [examples.with_images(seed=seed, steps=20) for seed in range(4)]
    lerobot.write(tmp_path / "new", made)
    assert len(list((tmp_path / "new/data").rglob("*.parquet"))) > 1
    for back, episode in zip(load(tmp_path / "new"), made, strict=True):
        examples.assert_same(back, episode)


def test_damage_to_our_export_is_reported(tmp_path: Path) -> None:
    lerobot.write(tmp_path / "new", [examples.with_images()])
    for name in ("data/chunk-000/file-000.parquet", "nightshift/episode-000000.safetensors"):
        path = tmp_path / "new" / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
        with pytest.raises(DataError, match=f"{name} is damaged"):
            load(tmp_path / "new")
        path.write_bytes(whole)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("theirs")
    with tarfile.open(THEIRS) as archive:
        files.extract(archive, folder)
    return folder


@pytest.mark.parametrize("kind", ["theirs_images", "theirs_films"])
def test_a_dataset_written_by_lerobot_is_read(theirs: Path, kind: str) -> None:
    for number, episode in enumerate(load(theirs / kind)):
        frames = np.arange(3 + number)
        assert episode.length == len(frames) + 1
        np.testing.assert_array_equal(episode.actions[:-1], np.stack([frames, np.full_like(frames, -number)], axis=1))
        np.testing.assert_array_equal(episode.observations["state"][:-1, 1], frames)
        np.testing.assert_array_equal(episode.observations["grid"][:-1, 1, 1], number + frames / 3)
        assert episode.observations["grid"].dtype == np.float64
        shown = episode.observations["top"][:-1, 16].astype(int)
        tolerance = 0 if kind == "theirs_images" else 6
        assert np.abs(shown[:, 2, 0] - (20 * frames + 40 * number)).max() <= tolerance
        assert np.abs(shown[:, 29, 0] - (200 - 30 * frames)).max() <= tolerance
        assert (episode.provenance.task, episode.provenance.language) == ("push_the_block", "push the block")
        assert episode.provenance.origin == f"{kind}#{number}"
        assert episode.metadata[REPEATED_FINAL] and episode.metadata["fps"] == 10
        assert episode.success and episode.terminated
        assert (SUCCESS_ASSUMED in episode.metadata) == (kind == "theirs_films")


def test_a_dataset_of_lerobot_survives_a_round_trip(theirs: Path, tmp_path: Path) -> None:
    made = load(theirs / "theirs_images", "push")
    lerobot.write(tmp_path / "again", made)
    assert json.loads((tmp_path / "again" / layout.INFO).read_text())["fps"] == 10
    for back, episode in zip(load(tmp_path / "again"), made, strict=True):
        examples.assert_same(back, episode)


def test_datasets_of_version_2_1_are_read(tmp_path: Path) -> None:
    """Files as LeRobot laid them out until 2025: one per episode."""
    root = tmp_path / "old"
    (root / "meta").mkdir(parents=True)
    (root / "data/chunk-000").mkdir(parents=True)
    features = {
        **{name: {"dtype": "float32", "shape": [2]} for name in ("observation.state", "action")},
        **{name: {"dtype": dtype, "shape": [1]} for name, dtype in layout.COUNTERS.items()},
    }
    info = {
        "codebase_version": "v2.1",
        "fps": 10,
        "chunks_size": 1000,
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
        "features": {
            **features,
            "observation.images.top": {"dtype": "video", "shape": [32, 32, 3]},
        },
    }
    (root / layout.INFO).write_text(json.dumps(info))
    task = "push\u2028slowly"  # JSON may have it as it is, and Python counts it as an end of line
    rows = [{"episode_index": number, "tasks": [task], "length": 4} for number in range(2)]
    (root / layout.OLD_EPISODES).write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    for number in range(2):
        vectors = pa.array((np.arange(8, dtype=np.float32).reshape(4, 2) + number).tolist(), pa.list_(pa.float32()))
        counters = {name: np.arange(4) for name in ("frame_index", "index", "task_index")}
        table = {"observation.state": vectors, "action": vectors, "timestamp": np.arange(4, dtype=np.float32) / 10}
        table |= {**counters, "episode_index": np.full(4, number)}
        pq.write_table(pa.table(table), root / f"data/chunk-000/episode_{number:06d}.parquet")
        levels = np.linspace(20, 200, 4).astype(np.uint8)[:, None, None, None]
        video = root / f"videos/chunk-000/observation.images.top/episode_{number:06d}.mp4"
        images.write_video(video, np.broadcast_to(levels, (4, 32, 32, 3)), 10)
    first, second = load(root)
    np.testing.assert_array_equal(second.actions[:-1] - first.actions[:-1], np.ones((4, 2)))
    assert np.abs(second.observations["top"][:-1, 0, 0, 0].astype(int) - [20, 80, 140, 200]).max() < 8


def _edit(root: Path, **changes: Any) -> None:
    info = json.loads((root / layout.INFO).read_text())
    (root / layout.INFO).write_text(json.dumps({**info, **changes}))


def test_what_is_no_dataset_or_names_files_elsewhere_is_refused(theirs: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is not a LeRobot dataset: it has no meta/info\.json"):
        load(tmp_path)
    with tarfile.open(THEIRS) as archive:
        files.extract(archive, tmp_path)
    root = tmp_path / "theirs_films"
    _edit(root, data_path="../../secret.parquet")
    with pytest.raises(DataError, match=r"refused: it refers to \.\./\.\./secret\.parquet, which is outside"):
        load(root)
    _edit(root, codebase_version="v1.6")
    with pytest.raises(DataError, match=r"of version v1\.6, not v3\.0 or v2\.1"):
        load(root)
    (root / layout.INFO).write_text("{")
    with pytest.raises(DataError, match=r"meta/info\.json is damaged"):
        load(root)


@pytest.mark.parametrize("kind", ["theirs_images", "theirs_films"])
def test_damage_to_a_dataset_of_lerobot_gives_a_data_error_or_an_episode(tmp_path: Path, kind: str) -> None:
    with tarfile.open(THEIRS) as archive:
        files.extract(archive, tmp_path)
    victims = sorted(path for path in (tmp_path / kind).rglob("*") if path.suffix in (".parquet", ".mp4"))
    locations = random.Random(1)
    refused = 0
    for trial in range(80):
        victim = victims[trial % len(victims)]
        whole = victim.read_bytes()
        damaged = bytearray(whole)
        damaged[locations.randrange(len(damaged))] ^= 1 << locations.randrange(8)
        victim.write_bytes(damaged if trial % 3 else whole[: locations.randrange(len(whole))])
        try:
            load(tmp_path / kind)
        except DataError as error:
            assert kind in str(error)
            refused += 1
        victim.write_bytes(whole)
    assert refused > 10
