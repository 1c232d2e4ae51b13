from pathlib import Path

import numpy as np
import pytest

from nightshift.data.shelf import SCHEMA, Shelf
from nightshift.errors import DataError
from tests.data.examples import assert_same, make


def test_what_is_put_is_there_for_who_opens_the_folder_again(tmp_path: Path) -> None:
    Shelf(tmp_path / "s").put("b-2", make(seed=2))
    Shelf(tmp_path / "s").put("a-1", make(seed=1))
    shelf = Shelf(tmp_path / "s")
    assert shelf.keys() == ["a-1", "b-2"]
    assert "a-1" in shelf
    assert "c" not in shelf
    assert_same(shelf.get("b-2"), make(seed=2))


def test_an_episode_that_breaks_the_schema_of_the_first_is_refused_and_not_written(tmp_path: Path) -> None:
    Shelf(tmp_path).put("good", make())
    shelf = Shelf(tmp_path)
    with pytest.raises(DataError, match="actions is float64, not float32"):
        shelf.put("bad", make(actions=make().actions.astype(np.float64)))
    assert shelf.keys() == ["good"]


def test_ranges_are_declared_with_the_first_episode_and_hold_for_all(tmp_path: Path) -> None:
    Shelf(tmp_path, ranges={"actions": (-1, 1)}).put("good", make())
    with pytest.raises(DataError, match=r"outside \[-1, 1\]"):
        Shelf(tmp_path).put("bad", make(actions=2 * make().actions))


def test_a_first_episode_that_is_not_sound_declares_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not finite"):
        Shelf(tmp_path).put("bad", make(rewards=np.full(6, np.nan, np.float32)))
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_half_written_is_swept(tmp_path: Path) -> None:
    Shelf(tmp_path).put("a", make())
    (tmp_path / ".b.safetensors.partial-0123abcd").write_bytes(b"half an episode")
    assert Shelf(tmp_path).keys() == ["a"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", SCHEMA]


@pytest.mark.parametrize("key", ["", "../a", "a/b", ".hidden", "a\0b", "ä"])
def test_a_key_cannot_lead_out_of_the_folder(tmp_path: Path, key: str) -> None:
    with pytest.raises(DataError, match="cannot be the name"):
        Shelf(tmp_path).put(key, make())


def test_a_damaged_schema_is_named(tmp_path: Path) -> None:
    (tmp_path / SCHEMA).write_text("{")
    with pytest.raises(DataError, match=r"schema\.json is damaged"):
        Shelf(tmp_path)
