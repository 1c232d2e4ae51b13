from __future__ import annotations

import random
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from nightshift.data.episode import Episode
from nightshift.data.episode_store import EpisodeStore
from nightshift.data.formats import OBSERVATIONS_SHIFTED, REPEATED_FINAL, hdf5
from nightshift.data.rate import FPS
from nightshift.errors import DataError
from tests.data.formats import hdf5_files
from tests.data.formats.hdf5_files import libero_demo, robomimic_demo, write_libero, write_robomimic


def only(path: Path, task: str = "") -> Episode:
    (entry,) = hdf5.list_episodes(path, task)
    return entry.load()


def test_a_libero_demo_keeps_every_value_dtype_and_word(tmp_path: Path) -> None:
    demo = libero_demo(steps=5, seed=1)
    episode = only(write_libero(tmp_path / "drawer_demo.hdf5", {"demo_0": demo}))
    assert episode.length == 6
    for name, seen in episode.observations.items():
        np.testing.assert_array_equal(seen[:-1], demo[f"obs/{name}"])
        assert seen.dtype == demo[f"obs/{name}"].dtype
    for mine, theirs in {"actions": "actions", "rewards": "rewards", "policy_actions": "actions"}.items():
        np.testing.assert_array_equal(getattr(episode, mine)[:-1], demo[theirs])
        assert getattr(episode, mine).dtype == demo[theirs].dtype
    for name in ("states", "robot_states", "dones"):
        np.testing.assert_array_equal(episode.extras[name][:-1], demo[name])
    assert (episode.terminated, episode.truncated, episode.success) == (True, False, True)
    origin = episode.provenance
    assert (origin.source, origin.suite) == ("hdf5", "libero_goal")
    assert origin.task == "open_the_middle_drawer_of_the_cabinet"
    assert origin.language == "open the middle drawer of the cabinet"
    assert (origin.split, origin.init_state, origin.origin) == ("train", None, "drawer_demo.hdf5#demo_0")


def test_without_a_final_observation_the_last_one_is_repeated_and_flagged(tmp_path: Path) -> None:
    episode = only(write_libero(tmp_path / "a.hdf5", {"demo_0": libero_demo(steps=5, seed=1)}))
    assert episode.metadata[REPEATED_FINAL] is True
    for seen in episode.observations.values():
        np.testing.assert_array_equal(seen[-1], seen[-2])


def test_observations_recorded_after_the_action_are_moved_to_the_next_one(tmp_path: Path) -> None:
    """As LIBERO's own script records: joints that are those of the next state, up to the noise of a playback."""
    demo = libero_demo(steps=6, seed=1)
    arm = np.cumsum(np.random.default_rng(0).normal(0, 0.02, (7, 7)), axis=0)
    demo["states"][:, 1:8] = arm[:-1]
    demo["obs/joint_states"] = arm[1:] + 1e-4
    episode = only(write_libero(tmp_path / "a.hdf5", {"demo_0": demo}))
    assert episode.metadata[OBSERVATIONS_SHIFTED] and REPEATED_FINAL not in episode.metadata
    assert episode.length == 6
    np.testing.assert_array_equal(episode.actions[:-1], demo["actions"][1:])
    np.testing.assert_array_equal(episode.extras["states"][:-1], demo["states"][1:])
    np.testing.assert_array_equal(episode.rewards[:-1], demo["rewards"][1:])
    for name, seen in episode.observations.items():
        np.testing.assert_array_equal(seen, demo[f"obs/{name}"])
    assert np.abs(episode.observations["joint_states"][:-1] - episode.extras["states"][:-1, 1:8]).max() < 1e-3


def test_robot_states_stay_beside_the_observations_that_they_are_a_part_of(tmp_path: Path) -> None:
    """LIBERO's script takes both from what `env.step` returned."""
    demo = libero_demo(steps=6, seed=1)
    arm = np.cumsum(np.random.default_rng(0).normal(0, 0.02, (7, 7)), axis=0)
    demo["states"][:, 1:8] = arm[:-1]
    demo["obs/joint_states"] = arm[1:]
    demo["robot_states"][:, :2] = demo["obs/gripper_states"]
    episode = only(write_libero(tmp_path / "a.hdf5", {"demo_0": demo}))
    assert episode.metadata[OBSERVATIONS_SHIFTED]
    np.testing.assert_array_equal(episode.extras["robot_states"][:, :2], episode.observations["gripper_states"])
    EpisodeStore(tmp_path / "store").put("0", episode)


def test_observations_recorded_before_the_action_stay_where_they_are(tmp_path: Path) -> None:
    """As scripts that regenerate LIBERO's demos record."""
    demo = libero_demo(steps=6, seed=1)
    demo["states"][:, 1:8] = demo["obs/joint_states"] + 1e-4
    episode = only(write_libero(tmp_path / "a.hdf5", {"demo_0": demo}))
    assert OBSERVATIONS_SHIFTED not in episode.metadata
    np.testing.assert_array_equal(episode.actions[:-1], demo["actions"])


def test_a_robomimic_demo_ends_with_the_observation_after_its_last_action(tmp_path: Path) -> None:
    demo = robomimic_demo(steps=4, seed=2)
    path = write_robomimic(tmp_path / "lift.hdf5", {"demo_3": demo}, {"train": ["demo_3"], "valid": ["demo_4"]})
    episode = only(path)
    np.testing.assert_array_equal(episode.observations["object"][-1], demo["next_obs/object"][-1])
    assert REPEATED_FINAL not in episode.metadata
    assert episode.metadata[hdf5.FILTER_KEYS] == ["train"]
    assert episode.metadata["env_args"]["env_kwargs"]["robots"] == ["Panda"]
    assert episode.metadata[FPS] == 20
    assert (episode.provenance.task, episode.provenance.suite, episode.provenance.language) == ("Lift", "hdf5", "")


@pytest.mark.parametrize(
    "wrong", [0, -20, "20", True, float("inf"), float("nan"), 10**400, None], ids=lambda v: str(v)[:9]
)
def test_a_control_frequency_that_is_none_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Any
) -> None:
    monkeypatch.setitem(hdf5_files.ENV_ARGS, "env_kwargs", {"control_freq": wrong})
    path = write_robomimic(tmp_path / "lift.hdf5", {"demo_0": robomimic_demo(steps=4, seed=2)}, {})
    assert FPS not in only(path).metadata


def test_a_demo_that_ends_unsolved_is_not_a_success(tmp_path: Path) -> None:
    demo = robomimic_demo(steps=4, seed=2, solved=False)
    assert not only(write_robomimic(tmp_path / "lift.hdf5", {"demo_0": demo}, {})).success


def test_demos_come_in_the_order_of_their_numbers_file_by_file(tmp_path: Path) -> None:
    demos = {f"demo_{number}": libero_demo(steps=2, seed=number) for number in (0, 1, 2, 9, 10, 11)}
    write_libero(tmp_path / "a.hdf5", demos)
    write_libero(tmp_path / "b.hdf5", {"demo_0": libero_demo(steps=2, seed=0)})
    entries = hdf5.list_episodes(tmp_path, "")
    places = [entry.load().provenance.origin for entry in entries]
    assert places == [*(f"a.hdf5#demo_{number}" for number in (0, 1, 2, 9, 10, 11)), "b.hdf5#demo_0"]
    assert [entry.key for entry in entries] == sorted(entry.key for entry in entries)


def test_a_file_without_a_task_asks_for_it(tmp_path: Path) -> None:
    path = tmp_path / "plain.hdf5"
    with h5py.File(path, "w") as file:
        for place, array in libero_demo(steps=2, seed=0).items():
            file[f"data/demo_0/{place}"] = array
    with pytest.raises(DataError, match=r"does not contain the name of its task\n.*--task NAME"):
        only(path)
    assert only(path, "open_drawer").provenance.task == "open_drawer"


def test_a_task_that_contradicts_the_file_is_refused(tmp_path: Path) -> None:
    path = write_libero(tmp_path / "a.hdf5", {"demo_0": libero_demo(steps=2, seed=0)})
    with pytest.raises(DataError, match="has the task open_the_middle_drawer_of_the_cabinet, not stack"):
        only(path, "stack")


@pytest.mark.parametrize(
    ("place", "value", "sentence"),
    [
        ("obs/ee_pos", np.zeros((3, 3)), "obs/ee_pos has 3 steps and actions has 4"),
        ("rewards", np.zeros(5), "rewards has 5 steps and actions has 4"),
        ("obs/words", np.array([b"a"] * 4), r"demo_0, obs, words is of dtype \|S1"),
        ("states", np.zeros(4, [("a", "f4")]), "states is of dtype"),
        ("note", 3.0, "note is not an array of steps"),
    ],
)
def test_what_an_episode_cannot_hold_is_refused_by_file_demo_and_field(
    tmp_path: Path, place: str, value: Any, sentence: str
) -> None:
    demo = {**libero_demo(steps=4, seed=0), place: value}
    with pytest.raises(DataError, match=sentence):
        only(write_libero(tmp_path / "a.hdf5", {"demo_0": demo}))


def test_a_raw_file_says_what_it_lacks(tmp_path: Path) -> None:
    demo: dict[str, Any] = {"actions": np.zeros((3, 7)), "states": np.zeros((3, 9))}
    with pytest.raises(DataError, match=r"demo_0 has no rewards\n.*dataset_states_to_obs"):
        only(write_robomimic(tmp_path / "raw.hdf5", {"demo_0": demo}, {}))
    demo["rewards"] = np.zeros(3)
    with pytest.raises(DataError, match=r"demo_0 has no observations\n.*dataset_states_to_obs"):
        only(write_robomimic(tmp_path / "raw.hdf5", {"demo_0": demo}, {}))


def secret(path: Path) -> Path:
    """A file of the machine with everything that a demo could want to link to."""
    return write_libero(path, {"demo_0": libero_demo(steps=3, seed=7)})


@pytest.mark.parametrize(
    ("place", "target"),
    [
        ("data", "/data"),
        ("data/demo_0", "/data/demo_0"),
        ("data/demo_0/obs", "/data/demo_0/obs"),
        ("data/demo_0/obs/ee_pos", "/data/demo_0/obs/ee_pos"),
        ("data/demo_0/actions", "/data/demo_0/actions"),
        ("mask", "/data"),
        ("mask/train", "/data/demo_0/actions"),
    ],
)
@pytest.mark.parametrize("soft", [False, True], ids=["external", "soft"])
def test_a_link_is_refused_wherever_it_hangs(tmp_path: Path, place: str, target: str, soft: bool) -> None:
    """A soft link may lead through an external one, so its target says nothing."""
    other = secret(tmp_path / "secret.hdf5")
    path = write_libero(tmp_path / "a.hdf5", {"demo_0": libero_demo(steps=3, seed=0)})
    with h5py.File(path, "a") as file:
        if place in file:
            del file[place]
        file["elsewhere"] = h5py.ExternalLink(str(other), "/")
        file[place] = h5py.SoftLink(f"/elsewhere{target}") if soft else h5py.ExternalLink(str(other), target)
    kind = "a soft link" if soft else "a link to another file"
    name = place.rpartition("/")[2]
    with pytest.raises(DataError, match=rf"a\.hdf5, .*{name} is {kind}, which is not followed"):
        only(path)


def test_a_name_with_a_slash_is_not_followed_as_a_path(tmp_path: Path) -> None:
    """No library writes such a name, but a file can hold it, and the path may lead through a link."""
    path = write_libero(tmp_path / "a.hdf5", {"demo_0": {**libero_demo(steps=3, seed=0), "zzzz_actions": np.zeros(3)}})
    path.write_bytes(path.read_bytes().replace(b"zzzz_actions", b"zzzz/actions"))
    with pytest.raises(DataError, match="demo_0, zzzz/actions is refused: its name would be followed as a path"):
        only(path)


def test_arrays_stored_in_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(np.zeros((3, 7)).tobytes())
    other = secret(tmp_path / "secret.hdf5")
    with h5py.File(other) as file:
        layout = h5py.VirtualLayout((3, 7), "f8")
        layout[:] = h5py.VirtualSource(file["data/demo_0/actions"])
    for name in ("external", "virtual"):
        path = write_libero(tmp_path / f"{name}.hdf5", {"demo_0": libero_demo(steps=3, seed=0)})
        with h5py.File(path, "a") as file:
            demo = file["data/demo_0"]
            if name == "external":
                demo.create_dataset(name, (3, 7), "f8", external=[(str(tmp_path / "raw"), 0, h5py.h5f.UNLIMITED)])
            else:
                demo.create_virtual_dataset(name, layout)
        with pytest.raises(DataError, match=f"demo_0, {name} is stored in other files"):
            only(path)


@pytest.mark.parametrize("how", ["gzip", "never written", "one huge chunk"])
def test_what_a_demo_unpacks_to_is_checked_before_it_is_read(tmp_path: Path, how: str) -> None:
    """85 kB once gave 1.6 GB."""
    path = write_libero(tmp_path / "bomb.hdf5", {"demo_0": libero_demo(steps=4, seed=0)})
    rows = (4, 100_000_000)
    with h5py.File(path, "a") as file:
        demo = file["data/demo_0"]
        if how == "one huge chunk":
            demo.create_dataset("obs/zeros", (4, 1), "f4", chunks=(4, 10**8), maxshape=(4, None), compression="gzip")
        else:
            demo.create_dataset("obs/zeros", rows, "f4", chunks=(1, 10**7), compression=how if how == "gzip" else None)
        if how == "gzip":
            demo["obs/zeros"].id.write_direct_chunk((0, 0), zlib.compress(bytes(4 * 10**7)))
    assert path.stat().st_size < 200_000
    with pytest.raises(DataError, match=r"bomb\.hdf5, demo_0 would unpack from .* kB to 1\.6 GB") as refusal:
        only(path)
    assert "--max-episode-gb 2" in refusal.value.next_step


def test_a_mask_cannot_name_more_demos_than_there_are(tmp_path: Path) -> None:
    path = write_robomimic(tmp_path / "lift.hdf5", {"demo_0": robomimic_demo(steps=3, seed=0)}, {})
    with h5py.File(path, "a") as file:
        file.create_dataset("mask/train", 10**9, h5py.string_dtype())
    with pytest.raises(DataError, match=r"/mask/train has shape \[1000000000\]; the file has 1 demos"):
        only(path)


def test_masks_of_text_of_any_length_are_read(tmp_path: Path) -> None:
    path = write_robomimic(tmp_path / "lift.hdf5", {"demo_0": robomimic_demo(steps=3, seed=0)}, {})
    with h5py.File(path, "a") as file:
        file["mask/better"] = ["demo_0"]
    assert only(path).metadata[hdf5.FILTER_KEYS] == ["better"]


def test_an_attribute_of_many_texts_is_refused_unread(tmp_path: Path) -> None:
    path = write_libero(tmp_path / "a.hdf5", {"demo_0": libero_demo(steps=3, seed=0)})
    with h5py.File(path, "a") as file:
        file["data"].attrs["env_args"] = ["{}"] * 1000
    with pytest.raises(DataError, match="the attribute env_args is not a text"):
        only(path)


@pytest.mark.parametrize(
    ("shape", "becomes"), [((4,), (5, 1)), ((4, 7), (5, 7)), ((4, 2, 3), None), ((4, 0), None)], ids=str
)
def test_actions_are_vectors(tmp_path: Path, shape: tuple[int, ...], becomes: tuple[int, ...] | None) -> None:
    path = write_libero(tmp_path / "a.hdf5", {"demo_0": {**libero_demo(steps=4, seed=0), "actions": np.zeros(shape)}})
    if becomes:
        assert only(path).actions.shape == becomes
        return
    with pytest.raises(DataError, match=r"a\.hdf5, demo_0, actions has shape .*; actions are \[N, A\]"):
        only(path)


def test_files_of_a_folder_may_be_links_within_it_only(tmp_path: Path) -> None:
    folder = tmp_path / "suite"
    folder.mkdir()
    write_libero(folder / "a.hdf5", {"demo_0": libero_demo(steps=3, seed=0)})
    (folder / "b.hdf5").symlink_to("a.hdf5")
    (folder / "c.hdf5").symlink_to(secret(tmp_path / "secret.hdf5"))
    first, second, third = hdf5.list_episodes(folder, "")
    assert first.load().length == second.load().length == 4
    with pytest.raises(DataError, match=r"c\.hdf5 is refused: it is a link to .*secret\.hdf5, which is outside"):
        third.load()


def test_big_endian_arrays_keep_their_values(tmp_path: Path) -> None:
    demo = libero_demo(steps=3, seed=0)
    swapped = {**demo, "actions": demo["actions"].astype(">f8")}
    episode = only(write_libero(tmp_path / "a.hdf5", {"demo_0": swapped}))
    assert episode.actions.dtype == np.dtype("=f8")
    np.testing.assert_array_equal(episode.actions[:-1], demo["actions"])


def test_a_file_without_demos_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.hdf5").write_bytes(b"not hdf5")
    with h5py.File(tmp_path / "b.hdf5", "w") as file:
        file["other"] = np.zeros(3)
    with pytest.raises(DataError, match=r"a\.hdf5 is damaged or has another layout"):
        hdf5.list_episodes(tmp_path / "a.hdf5", "")
    with pytest.raises(DataError, match=r"b\.hdf5 is neither a LIBERO nor a robomimic file"):
        hdf5.list_episodes(tmp_path / "b.hdf5", "")
    with pytest.raises(DataError, match=r"there is no file .*c\.hdf5"):
        hdf5.list_episodes(tmp_path / "c.hdf5", "")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"has no \.hdf5 or \.h5 files"):
        hdf5.list_episodes(tmp_path / "empty", "")


def test_a_cut_file_is_refused_wherever_it_was_cut(tmp_path: Path) -> None:
    whole = write_libero(tmp_path / "whole.hdf5", {"demo_0": libero_demo(steps=4, seed=0)}).read_bytes()
    for share in (0.0, 0.01, 0.3, 0.5, 0.9, 0.999):
        path = tmp_path / "cut.hdf5"
        path.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(DataError, match=r"cut\.hdf5 is damaged or has another layout"):
            only(path)


def test_a_flipped_bit_gives_a_data_error_or_a_valid_episode(tmp_path: Path) -> None:
    """HDF5 has no sums over plain arrays, so a bit in them can only be seen if it makes a number impossible."""
    whole = write_libero(tmp_path / "whole.hdf5", {"demo_0": libero_demo(steps=4, seed=0)}).read_bytes()
    places = random.Random(0)
    refused = 0
    for trial in range(150):
        damaged = bytearray(whole)
        damaged[places.randrange(len(damaged))] ^= 1 << places.randrange(8)
        path = tmp_path / "flipped.hdf5"
        path.write_bytes(damaged)
        try:
            for entry in hdf5.list_episodes(path, ""):
                EpisodeStore(tmp_path / f"store{trial}").check(entry.load(), "flipped.hdf5")
        except DataError as error:
            assert "flipped.hdf5" in str(error)
            refused += 1
    assert refused > 0
