import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load as peer_load
from safetensors.numpy import save as peer_save

from nightshift.data import tensors
from nightshift.errors import DataError

columns = st.dictionaries(
    st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda name: name != "__metadata__"),
    hnp.arrays(
        st.sampled_from(tensors.DTYPES).map(np.dtype), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
    ),
    max_size=4,
)


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert set(left) == set(right)
    for name, column in left.items():
        assert column.dtype == right[name].dtype
        np.testing.assert_array_equal(column, right[name])


@given(columns, st.text(st.characters(codec="utf-8")))
def test_what_is_written_is_read_and_other_readers_agree(content: dict[str, Any], note: str) -> None:
    written = tensors.to_bytes(content, note)
    again, note_again = tensors.from_bytes(written)
    assert_same(content, again)
    assert note_again == note
    assert_same(content, peer_load(written))


@given(columns.filter(bool))
def test_files_of_other_writers_are_read(content: dict[str, Any]) -> None:
    assert_same(content, tensors.from_bytes(peer_save(content))[0])


def test_a_file_is_read_as_read_only_views(tmp_path: Path) -> None:
    tensors.write(tmp_path / "a", {"frames": np.arange(12, dtype=np.uint8).reshape(3, 4)}, "note")
    content, note = tensors.read(tmp_path / "a")
    assert note == "note"
    np.testing.assert_array_equal(content["frames"][1], [4, 5, 6, 7])
    with pytest.raises(ValueError, match="read-only"):
        content["frames"][0] = 1


def test_scattered_arrays_are_written_in_order(tmp_path: Path) -> None:
    array = np.arange(12).reshape(3, 4)
    tensors.write(tmp_path / "a", {"turned": array.T, "every_other": array[:, ::2]}, "")
    content, _ = tensors.read(tmp_path / "a")
    assert_same(content, {"turned": array.T, "every_other": array[:, ::2]})


@given(st.integers(0, 400))
def test_a_file_cut_anywhere_is_refused(cut: int) -> None:
    whole = tensors.to_bytes({"a": np.arange(30.0), "b": np.ones(3, np.bool_)}, "note")
    with pytest.raises(DataError, match="not a readable"):
        tensors.from_bytes(whole[: min(cut, len(whole) - 1)])


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]},
        {"dtype": "O", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1]},
        {"dtype": "F32", "shape": [1 << 62, 4], "data_offsets": [0, 4]},
    ],
)
def test_an_inconsistent_header_is_rejected(entry: dict[str, Any]) -> None:
    text = json.dumps({"a": entry}).encode()
    with pytest.raises(DataError, match="not a readable"):
        tensors.from_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 4)


@pytest.mark.parametrize("header", ["[]", "1", '{"a": 1}', '{"__metadata__": []}', "[" * 100_000])
def test_other_json_is_refused(header: str) -> None:
    with pytest.raises(DataError, match="not a readable"):
        tensors.from_bytes(len(header).to_bytes(8, "little") + header.encode())


@given(st.binary(max_size=64))
def test_arbitrary_bytes_give_arrays_or_a_data_error(content: bytes) -> None:
    try:
        tensors.from_bytes(content)
    except DataError as error:
        assert "not a readable" in error.what


def test_objects_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="object"):
        tensors.write(tmp_path / "a", {"a": np.array([{}])}, "")
    assert not list(tmp_path.iterdir())


def test_the_byte_order_of_another_machine_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a is of dtype >f4; .* in this machine's byte order"):
        tensors.write(tmp_path / "a", {"a": np.zeros(2, ">f4")}, "")
    assert not list(tmp_path.iterdir())
