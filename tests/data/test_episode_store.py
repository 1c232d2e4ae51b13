from pathlib import Path

import numpy as np
import pytest

from nightshift.data.episode_store import SCHEMA, EpisodeStore
from nightshift.errors import DataError
from tests.data.examples import assert_same, make


def test_episodes_are_there_when_the_folder_is_opened_again(tmp_path: Path) -> None:
    EpisodeStore(tmp_path / "s").put("b-2", make(seed=2))
    EpisodeStore(tmp_path / "s").put("a-1", make(seed=1))
    store = EpisodeStore(tmp_path / "s")
    assert store.keys() == ["a-1", "b-2"]
    assert "a-1" in store
    assert "c" not in store
    assert_same(store.get("b-2"), make(seed=2))


def test_an_episode_that_breaks_the_schema_of_the_first_is_refused_and_not_written(tmp_path: Path) -> None:
    EpisodeStore(tmp_path).put("good", make())
    store = EpisodeStore(tmp_path)
    with pytest.raises(DataError, match="actions is float64, not float32"):
        store.put("bad", make(actions=make().actions.astype(np.float64)))
    assert store.keys() == ["good"]


def test_ranges_are_declared_with_the_first_episode_and_hold_for_all(tmp_path: Path) -> None:
    EpisodeStore(tmp_path, ranges={"actions": (-1, 1)}).put("good", make())
    with pytest.raises(DataError, match=r"outside \[-1, 1\]"):
        EpisodeStore(tmp_path).put("bad", make(actions=2 * make().actions))


def test_an_invalid_first_episode_declares_no_schema(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not finite"):
        EpisodeStore(tmp_path).put("bad", make(rewards=np.full(6, np.nan, np.float32)))
    assert not list(tmp_path.iterdir())


def test_temporary_files_of_a_killed_process_are_deleted(tmp_path: Path) -> None:
    EpisodeStore(tmp_path).put("a", make())
    (tmp_path / ".b.safetensors.partial-0123abcd").write_bytes(b"half an episode")
    EpisodeStore(tmp_path).put("c", make())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "c.safetensors", SCHEMA]


def test_reading_a_store_leaves_the_temporary_files_of_its_writer_alone(tmp_path: Path) -> None:
    EpisodeStore(tmp_path).put("a", make())
    temporary = tmp_path / ".b.safetensors.partial-0123abcd"
    temporary.write_bytes(b"half an episode")
    reader = EpisodeStore(tmp_path)
    assert [len(list(reader)), "a" in reader, reader.keys()] == [1, True, ["a"]]
    assert temporary.exists()


def test_an_episode_is_not_replaced_by_another_under_its_key(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path)
    store.put("a", make(seed=1))
    with pytest.raises(DataError, match=r"a\.safetensors holds another episode"):
        store.put("a", make(seed=2))
    assert_same(store.get("a"), make(seed=1))
    store.put("a", make(seed=1))  # the same episode again, as after a kill


@pytest.mark.parametrize("key", ["", "../a", "a/b", ".hidden", "a\0b", "ä"])
def test_a_key_cannot_point_outside_the_folder(tmp_path: Path, key: str) -> None:
    with pytest.raises(DataError, match="cannot be the name"):
        EpisodeStore(tmp_path).put(key, make())


def test_a_damaged_schema_is_named(tmp_path: Path) -> None:
    (tmp_path / SCHEMA).write_text("{")
    with pytest.raises(DataError, match=r"schema\.json is damaged"):
        EpisodeStore(tmp_path)
