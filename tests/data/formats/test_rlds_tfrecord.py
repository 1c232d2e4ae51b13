import hashlib
import json
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nightshift.data import rlds
from nightshift.data.episode import Episode
from nightshift.data.episode_store import EpisodeStore
from nightshift.data.formats import (
    REPEATED_FINAL,
    SUCCESS_ASSUMED,
    EpisodeRef,
    reader,
    rlds_tfrecord,
    tf_example,
    tfds_features,
    tfrecord,
)
from nightshift.data.formats.rlds_tfrecord import FEATURES, INFO, list_episodes, write
from nightshift.data.limits import Limits
from nightshift.data.tensors import DTYPES
from nightshift.errors import DataError
from tests.data.examples import assert_same, episodes, make, with_images

TINY_ARM = Path(__file__).parent / "files" / "tiny_arm"
"""Written by tensorflow-datasets 4.9.10: three episodes to train with and one in "val", every kind of feature."""

READ_BY_TFDS = {
    "action": "e31e1b0bc7e3a378",
    "counter": "5b2c25a06c7b6007",
    "discount": "78b2b20b8cc1c49d",
    "is_first": "3b9a90b032c22206",
    "is_last": "7b8437d81791c5b6",
    "is_terminal": "dd3abccd41b2ac79",
    "observation/depth": "267dc5247f8d0cde",
    "observation/image": "d4dd89b60117281b",
    "observation/mask": "d52a0188da6fbff2",
    "observation/range16": "ffe11b8e1279d01c",
    "observation/robot/grid": "36bd43aa32129079",
    "observation/robot/packed": "9c328509cd20a68e",
    "observation/robot/state": "7f0065a55e9cec1a",
    "observation/touch": "8a3f4f842876cddf",
    "observation/wrist": "ab6fc22e5bba874f",
    "phase": "456807b6143d182a",
    "reward": "8eceec26668a8d00",
}
"""SHA-256 of each field of its steps over all episodes, as tensorflow-datasets itself reads them."""

short = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "dataset"


def test_a_dataset_written_by_tfds_has_the_values_that_tfds_reads() -> None:
    read = [rlds.to_fields(entry.load()) for entry in list_episodes(TINY_ARM, "")]
    found = {}
    for name in READ_BY_TFDS:
        digest = hashlib.sha256()
        for fields in read:
            column = fields[name] if name in fields else fields[f"extras/{name}"]
            digest.update(f"{column.dtype} {column.shape}".encode() + column.tobytes())
        found[name] = digest.hexdigest()[:16]
    assert found == READ_BY_TFDS


def test_a_dataset_written_by_tfds_says_where_its_episodes_come_from() -> None:
    read = [entry.load() for entry in reader("rlds").list_episodes(TINY_ARM, "")]
    assert [e.provenance.language for e in read] == [f"open drawer {n}" for n in (0, 2, 1, 3)]
    assert [e.provenance.split for e in read] == ["train", "train", "train", "eval"]
    assert [(e.terminated, e.truncated) for e in read] == [(True, False), (False, True), (True, False), (True, False)]
    assert [e.success for e in read] == [True, False, False, True]
    assert read[0].provenance.origin == "tiny_arm-train.tfrecord-00000-of-00001, record 0"
    assert read[0].provenance.versions == {"tiny_arm": "1.2.0"}
    assert read[0].metadata == {
        "file_path": "raw/0.npy",
        "episode_id": -1,
        "weights": [0.0, 0.5],
        "steps/note": ["step 0", "step 1", "step 2"],
    }
    assert list_episodes(TINY_ARM, "open")[0].load().provenance.task == "open"


@short
@given(st.lists(episodes(max_steps=5), min_size=1, max_size=4), st.integers(1, 20_000))
def test_ours_to_rlds_and_back_is_exact(
    tmp_path_factory: pytest.TempPathFactory, some: list[Episode], shard: int
) -> None:
    path = tmp_path_factory.mktemp("d") / "dataset"
    write(path, iter(some), shard_bytes=shard)
    for entry, episode in zip(list_episodes(path, ""), some, strict=True):
        assert_same(entry.load(), episode)


@short
@given(st.data(), st.sampled_from(DTYPES), hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=5))
def test_arrays_of_any_kind_and_shape_come_back(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, dtype: str, shape: tuple[int, ...]
) -> None:
    path = tmp_path_factory.mktemp("d") / "dataset"
    values = hnp.from_dtype(np.dtype(dtype), allow_nan=False, allow_infinity=False)
    extra = data.draw(hnp.arrays(dtype, (3, *shape), elements=values))
    scalar = data.draw(hnp.arrays(dtype, 3, elements=values))
    episode = make(steps=3, extras={"any/array": extra, "scalar": scalar}, rewards=np.array([0.1, 0.2, 0.3]))
    write(path, [episode])
    assert_same(list_episodes(path, "")[0].load(), episode)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_images_are_lossless_for_any_number_of_channels(folder: Path, channels: int) -> None:
    seen = np.random.default_rng(0).integers(0, 256, (6, 7, 5, channels), np.uint8)
    write(folder, [make(observations={"camera": seen})])
    np.testing.assert_array_equal(list_episodes(folder, "")[0].load().observations["camera"], seen)
    kind = json.loads((folder / FEATURES).read_text())["featuresDict"]["features"]["steps"]["sequence"]["feature"]
    declared = kind["featuresDict"]["features"]["observation"]["featuresDict"]["features"]["camera"]
    assert ("image" in declared) == (channels != 4)


def test_shards_are_limited_in_size_and_keys_locate_episodes(folder: Path) -> None:
    some = [make(seed=seed) for seed in range(5)]
    write(folder, some, shard_bytes=4000)
    assert sorted(path.name for path in folder.glob("*tfrecord*")) == [
        f"nightshift_episodes-train.tfrecord-{shard:05d}-of-00003" for shard in range(3)
    ]
    keys = [entry.key for entry in list_episodes(folder, "")]
    assert keys == [
        "train-00000-000000",
        "train-00000-000001",
        "train-00001-000000",
        "train-00001-000001",
        "train-00002-000000",
    ]
    assert keys == [entry.key for entry in list_episodes(folder, "")]
    store = EpisodeStore(folder.parent / "store")
    for entry, episode in zip(list_episodes(folder, ""), some, strict=True):
        store.put(entry.key, entry.load())
        assert_same(store.get(entry.key), episode)


def test_episodes_to_evaluate_with_are_a_split_of_their_own(folder: Path) -> None:
    kept = make(seed=1)
    hidden = make(seed=2, provenance=replace(kept.provenance, split="eval"))
    write(folder, [hidden, kept])
    assert sorted(entry.key for entry in list_episodes(folder, "")) == ["eval-00000-000000", "train-00000-000000"]
    for entry in list_episodes(folder, ""):
        assert_same(entry.load(), hidden if entry.key.startswith("eval") else kept)


def test_the_same_episodes_give_the_same_bytes(folder: Path) -> None:
    write(folder / "a", [with_images()])
    write(folder / "b", [with_images()])
    for path in (folder / "a").iterdir():
        assert path.read_bytes() == (folder / "b" / path.name).read_bytes()


def test_a_write_that_fails_leaves_what_was_there(folder: Path) -> None:
    write(folder, [make(seed=1)])

    def failing() -> Iterator[Episode]:
        yield make(seed=2)
        raise RuntimeError("the source is gone")

    with pytest.raises(RuntimeError, match="the source is gone"):
        write(folder, failing())
    assert_same(list_episodes(folder, "")[0].load(), make(seed=1))
    assert [path.name for path in folder.parent.iterdir()] == ["dataset"]


def test_what_cannot_be_written_is_refused_and_nothing_is_there(folder: Path) -> None:
    for some, sentence in (
        ([], "no episodes to write"),
        ([make(), make(actions=np.zeros((6, 7)))], "episode 1 for .*: actions is float64, not float32"),
        ([make(rewards=np.full(6, np.nan, np.float32))], "rewards is not finite"),
        ([make(extras={"a": np.zeros(6), "a/b": np.zeros(6)})], "no feature can be named 'a'"),
        ([make(extras={"": np.zeros(6)})], "no feature can be named ''"),
    ):
        with pytest.raises(DataError, match=sentence):
            write(folder, some)
        assert not folder.exists()


def one_small(folder: Path) -> tuple[Path, bytes]:
    plain = make(steps=2, observations={"x": np.ones((2, 1), np.float32)}, actions=np.ones((2, 1), np.float32))
    write(folder, [replace(plain, policy_actions=plain.actions)] * 2)
    (shard,) = folder.glob("*.tfrecord-*")
    return shard, shard.read_bytes()


def all_of(folder: Path) -> list[Episode]:
    return [entry.load() for entry in list_episodes(folder, "")]


def test_a_shard_that_is_cut_at_any_place_is_noticed_by_listing_and_its_whole_records_are_read(folder: Path) -> None:
    shard, whole = one_small(folder)
    for size in range(len(whole)):
        shard.write_bytes(whole[:size])
        *sound, broken = list_episodes(folder, "")
        assert [entry.load().length for entry in sound] == [2] * (2 * size // len(whole))
        assert re.search(rf"{shard.name} (ends inside record|holds \d episodes)", str(broken.error))


def test_a_flipped_bit_in_any_byte_is_refused(folder: Path) -> None:
    shard, whole = one_small(folder)
    for place in range(len(whole)):
        content = bytearray(whole)
        content[place] ^= 1 << place % 8
        shard.write_bytes(content)
        with pytest.raises(DataError, match=rf"{shard.name}, record \d"):
            all_of(folder)


def test_listing_reads_no_record(folder: Path) -> None:
    some = [with_images(seed=seed) for seed in range(3)]
    write(folder, some)
    (shard,) = folder.glob("*.tfrecord-*")
    second = tfrecord.scan(shard)[1]
    content = bytearray(shard.read_bytes())
    content[second.offset : second.offset + second.length] = bytes(second.length)
    shard.write_bytes(content)
    listed = list_episodes(folder, "")
    assert_same(listed[2].load(), some[2])
    with pytest.raises(DataError, match="record 1 is damaged"):
        listed[1].load()


def test_a_missing_shard_and_a_wrong_count_are_named(folder: Path) -> None:
    write(folder, [make(seed=seed) for seed in range(3)], shard_bytes=1)
    info = json.loads((folder / INFO).read_text())
    info["splits"][0]["shardLengths"][2] = "2"
    (folder / INFO).write_text(json.dumps(info))
    next(folder.glob("*00001-of-00003")).unlink()
    first, second, third, fourth = list_episodes(folder, "")
    assert (first.load().length, third.load().length) == (6, 6)
    with pytest.raises(DataError, match="00001-of-00003 cannot be read"):
        second.load()
    with pytest.raises(DataError, match=r"00002-of-00003 holds 1 episodes; dataset_info.json says 2"):
        fourth.load()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"fileFormat": "array_record"}, "holds array_record files"),
        ({"splits": 3}, "is not the description of a TFDS dataset"),
        ({"splits": [{"name": "train", "shardLengths": ["one"]}]}, "is not the description of a TFDS dataset"),
        ({"splits": [{"name": "a/../../b", "shardLengths": ["1"]}]}, "no file is named"),
        (
            {"splits": [{"name": "train", "shardLengths": ["1"], "filepathTemplate": "{WHAT}"}]},
            "no file is named '{WHAT}'",
        ),
    ],
)
def test_a_wrong_description_is_refused(folder: Path, change: Any, sentence: str) -> None:
    write(folder, [make()])
    (folder / INFO).write_text(json.dumps({**json.loads((folder / INFO).read_text()), **change}))
    with pytest.raises(DataError, match=sentence):
        list_episodes(folder, "")


def test_a_folder_that_is_no_dataset_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"dataset_info.json cannot be read(.|\n)*give the folder of one version"):
        list_episodes(folder, "")
    write(folder, [make()])
    for name in (INFO, FEATURES):
        before = (folder / name).read_text()
        for content in ("{", "[]", "{}", '"text"', "[" * 100_000):
            (folder / name).write_text(content)
            with pytest.raises(DataError, match=name):
                list_episodes(folder, "")
        (folder / name).write_text(before)


def leaf(kind: str, **content: Any) -> dict[str, Any]:
    key = "image" if kind == "Image" else "tensor"
    return {"pythonClassName": f"tensorflow_datasets.core.features.x.{kind}", key: content}


@pytest.mark.parametrize(
    ("name", "feature", "sentence"),
    [
        ("observation", leaf("Video"), "observation is a feature of kind Video; read are"),
        ("observation", leaf("Tensor", dtype="bfloat16"), "observation is a tensor of bfloat16"),
        ("observation", leaf("Tensor", dtype="float32", shape={"dimensions": ["-1"]}), "has no fixed shape"),
        ("observation", leaf("Tensor", shape={"dimensions": ["2"]}), "is a tensor of unknown"),
        ("is_first", leaf("Tensor", dtype="int64"), "is_first of the steps is not a bool"),
        ("action", None, "steps have no action"),
        ("action", {"pythonClassName": "tensorflow_datasets.x.Text", "text": {}}, "steps have no action"),
        ("is_last", None, "steps have no is_last"),
        ("new", leaf("Tensor", dtype="float32"), "steps/new is missing, though features.json declares it"),
        ("reward", leaf("Tensor", dtype="int32"), "steps/reward holds float32, but int32 is declared"),
        ("policy_version", leaf("Tensor", dtype="uint8"), "holds numbers that do not fit into uint8"),
        ("action", leaf("Tensor", dtype="float32", shape={"dimensions": ["3"]}), r"has 42 numbers, not 6 times \[3\]"),
        ("reward", leaf("Tensor", dtype="float64", encoding="bytes"), "steps/reward holds numbers, not strings"),
        ("language_instruction", leaf("Tensor", dtype="int64"), "steps/language_instruction holds strings"),
        ("language_instruction", leaf("Image"), "holds an image that cannot be decoded"),
        ("language_instruction", leaf("Scalar", dtype="int16", encoding="zlib"), "zlib cannot read"),
        ("language_instruction", leaf("Scalar", dtype="int16", encoding="bytes"), "a value of 13 bytes, not of 2"),
    ],
)
def test_wrong_features_are_refused_by_name(folder: Path, name: str, feature: Any, sentence: str) -> None:
    write(folder, [make()])
    declared = json.loads((folder / FEATURES).read_text())
    steps = declared["featuresDict"]["features"]["steps"]["sequence"]["feature"]["featuresDict"]["features"]
    steps.pop(name, None)
    if feature is not None:
        steps[name] = feature
    (folder / FEATURES).write_text(json.dumps(declared))
    with pytest.raises(DataError, match=sentence):
        all_of(folder)


def test_a_record_that_is_no_example_is_named(folder: Path) -> None:
    shard, _ = one_small(folder)
    sound = tfrecord.read(tfrecord.scan(shard)[0])
    for record, sentence in (
        (b"\xff\xff", "record 1 is not a tf.train.Example"),
        (b"", "record 1: steps/is_first is missing"),
        (tf_example.encode({**tf_example.decode(sound), "steps/is_first": np.zeros(0, np.int64)}), "without steps"),
        (tf_example.encode({**tf_example.decode(sound), rlds_tfrecord._HEADER: [b"{}"]}), "as Nightshift writes it"),
        (tf_example.encode({**tf_example.decode(sound), rlds_tfrecord._HEADER: [b"\xff"]}), "bytes that are not UTF-8"),
    ):
        shard.write_bytes(tfrecord.frame_record(sound) + tfrecord.frame_record(record))
        first, second = list_episodes(folder, "")
        first.load()
        with pytest.raises(DataError, match=sentence):
            second.load()


def external(folder: Path, steps: Mapping[str, Any], about: Mapping[str, Any] | None = None) -> EpisodeRef:
    """An episode of an external dataset."""
    values = {"steps": dict(steps), "about": dict(about or {})}
    features = {
        part: {n: tfds_features.TEXT if isinstance(v, list) else tfds_features.feature_of(v) for n, v in given.items()}
        for part, given in values.items()
    }
    top = tfds_features.to_json(features["about"])
    top["featuresDict"]["features"]["steps"] = tfds_features.steps_json(features["steps"])
    split = {"name": "train", "shardLengths": ["1"]}
    folder.mkdir(parents=True)
    (folder / FEATURES).write_text(json.dumps(top))
    (folder / INFO).write_text(json.dumps({"name": "theirs", "splits": [split]}))
    encoded = {f"steps/{n}": tfds_features.encode(features["steps"][n], v) for n, v in steps.items()}
    encoded |= {n: tfds_features.encode(features["about"][n], v) for n, v in values["about"].items()}
    shard = folder / "theirs-train.tfrecord-00000-of-00001"
    shard.write_bytes(tfrecord.frame_record(tf_example.encode(encoded)))
    (entry,) = list_episodes(folder, "push")
    return entry


def three(**changes: Any) -> dict[str, Any]:
    plain = {
        "is_first": np.array([True, False, False]),
        "is_last": np.array([False, False, True]),
        "is_terminal": np.array([False, False, True]),
        "observation": np.arange(3, dtype=np.float32)[:, None],
        "action": np.ones((3, 2), np.float32),
        "reward": np.array([0, 1, 0], np.float32),
        "discount": np.ones(3, np.float32),
    }
    return {name: value for name, value in {**plain, **changes}.items() if value is not None}


def test_steps_without_reward_discount_and_end_are_a_demonstration_and_metadata_says_so(folder: Path) -> None:
    read = external(folder, three(reward=None, discount=None, is_terminal=None)).load()
    assert read.metadata == {"not_in_source": ["reward", "discount", "is_terminal"], SUCCESS_ASSUMED: True}
    assert read.rewards.tolist() == [0, 1, 0]
    assert read.discounts.tolist() == [1, 1, 1]
    assert read.masks.tolist() == [1, 0]
    assert (read.terminated, read.truncated, read.success) == (True, False, True)


def test_a_demonstration_without_rewards_that_was_cut_short_stays_so(folder: Path) -> None:
    read = external(folder, three(reward=None, is_terminal=np.zeros(3, np.bool_))).load()
    assert (read.terminated, read.truncated, read.success) == (False, True, True)
    assert read.masks.tolist() == [1, 1]


@pytest.mark.parametrize("success", [True, False])
@pytest.mark.parametrize(
    "about", ["episode_metadata/success", "success", "episode_metadata/is_success", "a text", "steps"]
)
def test_a_note_on_success_is_not_assumed_and_gives_the_missing_fields(folder: Path, about: str, success: bool) -> None:
    steps = three(reward=None, is_terminal=None)
    if about == "steps":
        read = external(folder, {**steps, "success": np.array([False, False, success])}).load()
    elif about == "a text":
        read = external(folder, steps, {"episode_metadata/success": [str(success)]}).load()
    else:
        read = external(folder, steps, {about: np.array([success])}).load()
    assert SUCCESS_ASSUMED not in read.metadata
    assert (read.success, read.terminated, read.truncated) == (success, success, not success)
    assert read.rewards.tolist() == [0, success, 0]


@pytest.mark.parametrize("reward", [1, 0])
def test_without_an_end_in_the_source_the_last_reward_says_whether_the_task_ended(folder: Path, reward: int) -> None:
    read = external(folder, three(reward=np.array([0, reward, 0], np.float32), is_terminal=None)).load()
    assert (read.success, read.terminated, read.truncated) == (bool(reward), bool(reward), not reward)
    assert read.rewards.tolist() == [0, reward, 0]


def test_shaped_rewards_do_not_say_that_the_task_ended(folder: Path) -> None:
    read = external(folder, three(reward=np.array([0.1, 0.2, 0], np.float32), is_terminal=None)).load()
    assert (read.success, read.terminated, read.truncated) == (False, False, True)


def test_a_source_that_rewards_its_last_step_gets_a_step_after_it(folder: Path) -> None:
    read = external(folder, three(reward=np.array([0, 0, 1], np.float32))).load()
    assert read.metadata == {REPEATED_FINAL: True}
    assert read.observations["observation"].tolist() == [[0], [1], [2], [2]]
    assert read.rewards.tolist() == [0, 0, 1, 0]
    assert read.actions.tolist() == [[1, 1], [1, 1], [1, 1], [0, 0]]
    assert read.masks.tolist() == [1, 1, 0]
    assert read.success


def test_an_action_in_parts_is_its_floats_in_the_order_of_their_names(folder: Path) -> None:
    parts = {
        "action/world": np.full((3, 2), 2, np.float32),
        "action/grip": np.full(3, 1, np.float32),
        "action/stop": np.full((3, 1), 7, np.int32),
    }
    read = external(folder, three(action=None, **parts)).load()
    assert read.actions.tolist() == [[1, 2, 2]] * 3
    assert read.extras["action/stop"].tolist() == [[7]] * 3


def test_parts_of_an_action_that_do_not_fit_together_are_refused(folder: Path) -> None:
    parts = {"action/a": np.zeros((3, 2), np.float32), "action/b": np.zeros((3, 2))}
    with pytest.raises(DataError, match="have different dtypes: action/a is float32, action/b is float64"):
        external(folder, three(action=None, **parts)).load()


def test_a_discrete_action_has_one_dimension_and_a_reward_none(folder: Path) -> None:
    read = external(folder, three(action=np.array([1, 2, 0]), reward=np.array([[0], [1], [0]], np.float32))).load()
    assert read.actions.tolist() == [[1], [2], [0]]
    assert read.rewards.shape == (3,)
    EpisodeStore(folder.parent / "store").put("a", read)


def test_external_fields_with_our_names_become_extras(folder: Path) -> None:
    read = external(folder, three(intervention=np.array([1, 0, 0]), policy_action=np.zeros((3, 9)))).load()
    assert set(read.extras) == {"intervention", "policy_action"}
    assert not read.interventions.any()
    np.testing.assert_array_equal(read.policy_actions, read.actions)


def test_texts_that_change_are_kept_step_by_step_and_the_first_steady_instruction_is_the_language(folder: Path) -> None:
    texts = {"language_instruction": ["a", "b", "b"], "observation/natural_language_instruction": ["c", "c", "c"]}
    read = external(folder, three(observation=None, **texts), {"episode_metadata/success": np.array([False])}).load()
    assert read.provenance.language == "c"
    assert read.provenance.task == "push"
    assert read.metadata == {"steps/language_instruction": ["a", "b", "b"], "success": False}
    assert not read.success


def test_without_a_constant_instruction_the_task_must_be_given(folder: Path) -> None:
    external(folder / "never", three())
    with pytest.raises(DataError, match=r"features.json declares no language instruction(.|\n)*name the task"):
        list_episodes(folder / "never", "")
    external(folder / "changing", three(language_instruction=["a", "b", "b"]))
    with pytest.raises(DataError, match=r"record 0 has no language instruction(.|\n)*name the task"):
        all_of(folder / "changing")


def test_invalid_external_steps_are_reported(folder: Path) -> None:
    entry = external(folder, three(is_last=np.array([False, True, False])))
    with pytest.raises(DataError, match=r"00001, record 0, step 2: it is terminal"):
        entry.load()


def test_images_of_several_sizes_are_rejected(folder: Path) -> None:
    shutil.copytree(TINY_ARM, folder)
    shard = folder / "tiny_arm-val.tfrecord-00000-of-00001"
    features = tf_example.decode(tfrecord.read(tfrecord.scan(shard)[0]))
    big, small = features["steps/observation/wrist"][0], features["steps/observation/image"][0]
    for images, sentence in (
        ([big, small], r"wrist holds images of several sizes: \[8, 6, 3\], \[16, 16, 3\]"),
        ([big, b"GIF89a"], "wrist holds an image that cannot be decoded"),
        ([big, features["steps/observation/range16"][0]], "wrist holds an image of uint16"),
    ):
        shard.write_bytes(tfrecord.frame_record(tf_example.encode({**features, "steps/observation/wrist": images})))
        with pytest.raises(DataError, match=sentence):
            list_episodes(folder, "")[-1].load()


def test_shards_may_be_links_within_the_dataset_only(folder: Path, tmp_path: Path) -> None:
    write(folder, [make(seed=seed) for seed in range(2)], shard_bytes=1)
    first, second = sorted(folder.glob("*.tfrecord-*"))
    first.rename(folder / "inside")
    first.symlink_to("inside")
    second.rename(tmp_path / "secret")
    second.symlink_to(tmp_path / "secret")
    sound, refused = list_episodes(folder, "")
    assert_same(sound.load(), make(seed=0))
    assert refused.error and f"{second.name} is refused: it is a link to" in refused.error.what
    (folder / INFO).rename(tmp_path / INFO)
    (folder / INFO).symlink_to(tmp_path / INFO)
    with pytest.raises(DataError, match=f"{INFO} is refused: it is a link to"):
        list_episodes(folder, "")


def with_feature(folder: Path, feature: Mapping[str, Any], value: bytes) -> None:
    """An external episode of three steps, each with this value of a feature "odd"."""
    external(folder, three())
    (shard,) = folder.glob("*.tfrecord-*")
    features = tf_example.decode(tfrecord.read(tfrecord.scan(shard)[0]))
    shard.write_bytes(tfrecord.frame_record(tf_example.encode({**features, "steps/odd": [value] * 3})))
    declared = json.loads((folder / FEATURES).read_text())
    declared["featuresDict"]["features"]["steps"]["sequence"]["feature"]["featuresDict"]["features"]["odd"] = feature
    (folder / FEATURES).write_text(json.dumps(declared))


def black(size: int) -> bytes:
    (png,) = tfds_features.encode(tfds_features.Feature(kind="image"), np.zeros((1, size, size, 3), np.uint8))
    return bytes(png)


@pytest.mark.parametrize(
    ("feature", "value"),
    [
        (leaf("Tensor", dtype="uint8", encoding="zlib", shape={"dimensions": ["12000000"]}), zlib.compress(bytes(9))),
        (leaf("Image", shape={"dimensions": ["2000", "2000", "3"]}), black(2000)),
        (leaf("Image", shape={"dimensions": ["-1", "-1", "3"]}), black(2000)),
    ],
    ids=["zlib", "image", "image of any size"],
)
def test_what_a_record_decodes_to_is_checked_before_it_is_decoded(folder: Path, feature: Any, value: bytes) -> None:
    with_feature(folder, feature, value)
    (entry,) = list_episodes(folder, "push", Limits(floor=10**6, ceiling=10**9))
    with pytest.raises(DataError, match=r"record 0 would unpack from .* to 36\.0 MB"):
        entry.load()


def test_an_image_of_another_size_than_declared_is_refused_undecoded(folder: Path) -> None:
    with_feature(folder, leaf("Image", shape={"dimensions": ["8", "8", "3"]}), black(2000))
    with pytest.raises(DataError, match=r"steps/odd holds an image of \[2000, 2000\], but \[8, 8, 3\] is declared"):
        list_episodes(folder, "push")[0].load()


@pytest.mark.parametrize("shape", [["-2", "3"], ["0", "8", "3"], ["8"], ["8", "8", "3", "3"]], ids=str)
@pytest.mark.parametrize("kind", ["Tensor", "Image"])
def test_shapes_that_are_none_are_refused(folder: Path, kind: str, shape: list[str]) -> None:
    with_feature(folder, leaf(kind, dtype="uint8", shape={"dimensions": shape}), b"")
    with pytest.raises(DataError, match=r"odd (is an image of shape|has no fixed shape|holds strings)"):
        list_episodes(folder, "push")[0].load()


@pytest.mark.parametrize(("shape", "becomes"), [((3,), (3, 1)), ((3, 2, 2), None)], ids=str)
def test_actions_are_vectors(folder: Path, shape: tuple[int, ...], becomes: tuple[int, ...] | None) -> None:
    entry = external(folder, three(action=np.zeros(shape, np.float32)))
    if becomes:
        assert entry.load().actions.shape == becomes
        return
    with pytest.raises(DataError, match=r"record 0: action has shape \[3, 2, 2\]; actions are \[N, A\]"):
        entry.load()
