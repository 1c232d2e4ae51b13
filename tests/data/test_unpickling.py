from __future__ import annotations

import os
import pickle
from collections import OrderedDict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from nightshift.data import unpickling
from nightshift.errors import DataError

PLAIN = arrays.boolean_dtypes() | arrays.integer_dtypes() | arrays.unsigned_integer_dtypes() | arrays.floating_dtypes()


class Calls:
    """A pickle of this runs `function(*arguments)` wherever it is read without care."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


class Point:
    def __init__(self) -> None:
        self.x = np.arange(3)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@given(array=arrays.arrays(PLAIN | arrays.unicode_string_dtypes(), arrays.array_shapes(min_dims=0, min_side=0)))
def test_arrays_of_every_protocol_come_back(protocol: int, array: Any) -> None:
    content = pickle.dumps({"a": array, "again": [array], "t": (np.copy(array, order="F"),)}, protocol)
    loaded = unpickling.loads(content, "content")
    for found in (loaded["a"], loaded["again"][0], loaded["t"][0]):
        assert type(found) is np.ndarray
        assert found.dtype == array.dtype and found.shape == array.shape
        assert found.tobytes() == array.tobytes()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_containers_scalars_and_dtypes_come_back(protocol: int) -> None:
    value: dict[str, Any] = {
        "scalars": [np.float32(1.5), np.int64(-3), np.bool_(True), np.str_("cup"), 2**70, None, 1j],
        "containers": (
            OrderedDict(a=1),
            deque([1, np.zeros(2)]),
            {1, 2},
            frozenset("ab"),
            b"\x00\xff",
            bytearray(b"x"),
        ),
        "dtype": np.dtype(">f4"),
    }
    value["containers"] = value["containers"][:5] if protocol < 5 else value["containers"]
    loaded = unpickling.loads(pickle.dumps(value, protocol), "content")
    assert loaded["scalars"] == value["scalars"] and type(loaded["scalars"][0]) is np.float32
    assert loaded["dtype"] == np.dtype(">f4")
    assert loaded["containers"][0] == OrderedDict(a=1) and loaded["containers"][2:] == value["containers"][2:]
    assert np.array_equal(loaded["containers"][1][1], np.zeros(2))


def test_a_list_that_holds_itself_comes_back() -> None:
    ring: list[Any] = [np.arange(2)]
    ring.append(ring)
    loaded = unpickling.loads(pickle.dumps(ring), "ring")
    assert loaded[1] is loaded and np.array_equal(loaded[0], [0, 1])


@pytest.mark.parametrize(
    "hostile",
    [
        Calls(os.system, "touch owned"),
        Calls(eval, "open('owned', 'w')"),
        Calls(getattr, "", "join"),
        Calls(np.load, "owned.npy"),
        Calls(__import__, "os"),
        Calls(pickle.loads, b""),
    ],
)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_hostile_file_is_refused_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hostile: Calls, protocol: int
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "transitions.pkl"
    path.write_bytes(pickle.dumps([np.zeros(2), {"a": hostile}], protocol))
    with pytest.raises(DataError, match=r"transitions\.pkl is refused: it asks for"):
        unpickling.load(path)
    assert not (tmp_path / "owned").exists()


def test_attributes_of_allowed_globals_cannot_be_reached() -> None:
    for dotted in (b"builtins\nset.__class__\n", b"numpy\nndarray.tofile\n", b"collections\nOrderedDict.__init__\n"):
        with pytest.raises(DataError, match="is refused"):
            unpickling.loads(b"\x80\x04c" + dotted + b".", "content")


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.array([object], dtype=object)[:0], "dtype 'O8'"),
        (np.zeros(2, [("a", "f4"), ("b", "O")]), "dtype 'V12'"),
        (np.zeros(2, "M8[s]"), "dtype 'M8'"),
    ],
)
def test_dtypes_that_could_hide_pointers_are_refused(array: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        unpickling.loads(pickle.dumps(array), "content")


def test_a_dtype_cannot_gain_fields_from_its_state() -> None:
    class Forged:
        def __reduce__(self) -> Any:
            fields = {"a": (np.dtype("f8"), 0)}
            return np.dtype, ("f8", False, True), (3, "|", None, ("a",), fields, 8, 8, 0)

    with pytest.raises(DataError, match="named fields"):
        unpickling.loads(pickle.dumps(Forged()), "content")


def test_an_array_cannot_claim_more_memory_than_its_bytes() -> None:
    rebuild = np.zeros(1).__reduce__()[0]

    class Forged:
        def __reduce__(self) -> Any:
            return rebuild, (np.ndarray, (2**50,), b"b"), (1, (2**50,), np.dtype("u1"), False, b"12")

    with pytest.raises(DataError, match="an array with 2 bytes and shape"):
        unpickling.loads(pickle.dumps(Forged()), "content")


@given(data=st.data())
def test_a_damaged_pickle_gives_a_value_or_a_data_error(data: st.DataObject) -> None:
    content = bytearray(pickle.dumps({"a": np.arange(6, dtype=np.int16), "b": ["text", 1.5]}))
    content = content[: data.draw(st.integers(0, len(content)))]
    for position, byte in data.draw(st.dictionaries(st.integers(0, 200), st.integers(0, 255), max_size=4)).items():
        if position < len(content):
            content[position] = byte
    try:
        unpickling.loads(bytes(content), "content")
    except DataError as error:
        assert "content" in str(error)


def test_a_class_that_is_allowed_is_replaced_and_runs_no_code() -> None:
    content = pickle.dumps([Point()])
    with pytest.raises(DataError, match=r"asks for tests\.data\.test_unpickling\.Point"):
        unpickling.loads(content, "content")
    [point] = unpickling.loads(content, "content", {f"{Point.__module__}.Point": unpickling.RECORD})
    assert type(point) is SimpleNamespace and np.array_equal(point.x, [0, 1, 2])


NESTED = b"N" + b"\x85" + b"2\x86" * 60
"""t = (t, t) sixty times over: 2**60 tuples in 122 bytes."""
REMEMBERED = b"\x80\x04N\x85" + b"".join(b"\x94h" + bytes([n]) + b"\x86" for n in range(60))


@pytest.mark.parametrize("nested", [NESTED, REMEMBERED])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"", b""),
        (b"]", b"a"),
        (b"}", b"Ns"),
        (b"\x8f(", b"\x90"),
        (b"(", b"\x91"),
        (b"cbuiltins\nset\n]", b"a\x85R"),
        (b"cnumpy\ndtype\n", b"\x85R"),
        (b"c_codecs\nencode\nN", b"\x86R"),
    ],
)
def test_a_tuple_that_unfolds_without_end_is_refused_at_once(nested: bytes, before: bytes, after: bytes) -> None:
    with pytest.raises(DataError, match="content is not a readable pickle: it contains a tuple of"):
        unpickling.loads(before + nested + after + b".", "content")


def test_a_tuple_too_deep_for_the_machine_to_hash_is_refused() -> None:
    with pytest.raises(DataError, match="of depth 101"):
        unpickling.loads(b"}N" + b"\x85" * 500_000 + b"Ns.", "content")


def test_lists_too_deep_to_go_through_are_refused() -> None:
    with pytest.raises(DataError, match="not a readable pickle"):
        unpickling.loads(b"]" * 500 + b"a" * 4999 + b".", "content")


def test_what_is_shared_stays_shared() -> None:
    pair = (np.arange(2), "x")
    loaded = unpickling.loads(pickle.dumps([pair, pair, {"again": pair, ("a", ("b", 1)): 2}]), "content")
    assert loaded[0] is loaded[1] is loaded[2]["again"] and np.array_equal(loaded[0][0], [0, 1])
    assert loaded[2]["a", ("b", 1)] == 2


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("_codecs\nencode", (None, {"__defaults__": ("utf16",)})),
        ("_codecs\nencode", {"mark": 1}),
        ("_codecs\nencode", (None, {"_function": None})),
        ("numpy\ndtype", (None, {"__kwdefaults__": None})),
        ("builtins\nset", (None, {"add": None})),
        ("collections\nOrderedDict", {"mark": 1}),
    ],
)
def test_a_file_cannot_change_what_it_may_call(name: str, state: Any) -> None:
    content = b"c" + name.encode() + b"\n" + pickle.dumps(state, 2)[2:-1] + b"b."
    with pytest.raises(DataError, match="not a readable pickle"):
        unpickling.loads(content, "content")
    assert unpickling.loads(b"c_codecs\nencode\nVab\n\x85R.", "content") == b"ab"


def test_a_function_allowed_by_the_caller_cannot_be_changed_either() -> None:
    def ours() -> int:
        return 1

    content = b"cours\nours\n" + pickle.dumps({"mark": 1}, 2)[2:-1] + b"b."
    with pytest.raises(DataError, match="not a readable pickle"):
        unpickling.loads(content, "content", {"ours.ours": ours})
    assert not vars(ours)


@pytest.mark.parametrize(
    "value", [{np.dtype("f4"): 1}, {(np.dtype("f4"),): 1}, {np.dtype("f4")}, frozenset([1j, (np.dtype("f4"),)])]
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_no_placeholder_is_left_in_a_result(value: Any, protocol: int) -> None:
    with pytest.raises(DataError, match="an array or a dtype as a key"):
        unpickling.loads(pickle.dumps(value, protocol), "content")


def nested(count: int) -> bytes:
    """Opcodes for a tuple of `count` tuples, memoized under 0."""
    return b"(" + b"N\x85" * count + b"t\x94"


AGAIN = b"h\x00"
"""Pushes what is memoized under 0."""


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x80\x04" + nested(9000) + b"0}(" + (AGAIN + b"N") * 50_000 + b"u.", "take too long"),
        (b"\x80\x04" + nested(9000) + b"0\x8f(" + AGAIN * 50_000 + b"\x90.", "take too long"),
        (b"\x80\x04}(" + b"".join(b"(K\x01K\x02tN" for _ in range(20_000)) + b"u.", "too many tuples"),
        (
            b"\x80\x04}(" + b"".join(pickle.dumps(n * (2**61 - 1), 2)[2:-1] + b"N" for n in range(1, 5_000)) + b"u.",
            "take too long",
        ),
        (
            b"\x80\x04]\x94("
            + b"K\x01" * 50_000
            + b"e0cbuiltins\nset\n\x940]("
            + (b"h\x01" + AGAIN + b"\x85R") * 5_000
            + b"e.",
            "take too long",
        ),
        (
            b"\x80\x04X"
            + (10**6).to_bytes(4, "little")
            + b"x" * 10**6
            + b"\x940c_codecs\nencode\n\x940]("
            + (b"h\x01" + AGAIN + b"\x85R") * 5_000
            + b"e.",
            "take too long",
        ),
        (
            b"\x80\x04X" + (10**6).to_bytes(4, "little") + b"x" * 10**6 + b"\x940}(" + (AGAIN + b"N") * 100_000 + b"u.",
            "take too long",
        ),
        (b"\x80\x04Nr\xff\xff\xff\x7f.", "memoizes an object under the number 2147483647"),
        (b"\x80\x04\x95" + (2**60).to_bytes(8, "little") + b"N.", "a frame of"),
        (b"\x80\x04\x8e" + (2**40).to_bytes(8, "little") + b"abc.", "expected 1099511627776 bytes"),
    ],
    ids=["dict", "set", "tuples", "collisions", "sets", "encode", "text", "memo", "frame", "length"],
)
def test_work_without_end_is_refused_before_it_is_done(content: bytes, said: str) -> None:
    """The first two kept a process busy for a minute: two megabytes of uses of one key that is slow to hash."""
    with pytest.raises(DataError, match=f"content is not a readable pickle: .*{said}"):
        unpickling.loads(content, "content")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_what_python_writes_is_never_too_much_work(protocol: int) -> None:
    value: dict[str, Any] = {
        "scalars": [np.float32(n) for n in range(500)],
        "arrays": [np.full(2, n) for n in range(200)],
        "sets": [{n, n + 1} for n in range(200)],
        "ordered": [OrderedDict(zip("abc", (1, 2, n), strict=True)) for n in range(100)],
        "texts": {f"key {n}": b"bytes" * 10 for n in range(500)},
        "tuples": [(n, (n, "a")) for n in range(500)],
        "numbers": dict.fromkeys(range(500)),
        "shared": [[1, 2, 3]] * 500,
        "large": [2**200] * 10,
    }
    loaded = unpickling.loads(pickle.dumps(value, protocol), "content")
    assert [len(part) for part in loaded.values()] == [len(part) for part in value.values()]


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.pkl").touch()
    with pytest.raises(DataError, match=r"a\.pkl is not a readable pickle: it is empty"):
        unpickling.load(tmp_path / "a.pkl")
