"""Pickles of other projects, read as data: numpy arrays, scalars and dtypes in plain containers, and nothing else.

A pickle is a program that may call anything it can name. Here it can name only what stands in `ADMITTED`, and numpy's
own constructors are replaced by ones that check what they are given: numpy's trust a file's word about the memory it
describes. Nothing of ours can be changed by it. Arrays come back as read-only views of the bytes in the file.
"""

from __future__ import annotations

import math
import pickle
import pickletools
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nightshift.errors import DataError

Allowed = Mapping[str, Callable[..., Any]]
"""What stands in for the classes and functions a file may name, by dotted name; called with what the file says.

Classes are built-in ones, since a file can set the attributes of any other.
"""

RECORD = SimpleNamespace
"""Stands in for a class of plain fields: they become attributes, whatever the class would have done with them."""

NOT_A_PICKLE = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    OverflowError,
    MemoryError,
    RuntimeError,
)
"""What Python says of a pickle that is cut, changed, or not one at all."""
_DTYPE = re.compile(r"[<>=|]?(b1|[iu][1248]|f[248]|c8|c16|[SU]\d{1,6})")
_MOST_DIMENSIONS = 32
_DEEPEST_TUPLE = 100
_MOST_TUPLES_IN_ONE = 10_000


def load(path: Path, allowed: Allowed | None = None) -> Any:
    """What a pickle holds; a file that names anything beyond `ADMITTED` and `allowed` is refused before it runs."""
    with path.open("rb") as stream:
        return _load(stream, str(path), allowed or {})


def loads(content: bytes, name: str, allowed: Allowed | None = None) -> Any:
    """As `load`, of a pickle in memory; `name` says in errors whose it is."""
    return _load(BytesIO(content), name, allowed or {})


def _load(stream: IO[bytes], name: str, allowed: Allowed) -> Any:
    try:
        _refuse_bombs(stream)
        stream.seek(0)
        return _settled(_Unpickler(stream, name, {**ADMITTED, **allowed}).load(), {})
    except NOT_A_PICKLE as error:
        raise DataError(f"{name} is not a readable pickle: {error}") from None


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: IO[bytes], name: str, admitted: Allowed) -> None:
        super().__init__(stream)
        self._name = name
        self._admitted = admitted

    def find_class(self, module: str, name: str) -> Any:
        try:
            found = self._admitted[f"{module}.{name}"]
        except KeyError:
            raise DataError(
                f"{self._name} is refused: it asks for {module}.{name}, and a pickle that names code can run it",
                "use the file only if you trust its origin, and convert it where it was made",
            ) from None
        return found if isinstance(found, type) else _Closed(found)


class _Closed:
    """A function that a file can call and not change."""

    __slots__ = ("_function",)
    _function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "_function", function)

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __setattr__(self, name: str, value: Any) -> None:
        raise pickle.UnpicklingError("it changes a function that it may only call")


class _StandIn:
    """Of what it stands for, nothing can be a key or the member of a set: neither can be replaced afterwards."""

    def __hash__(self) -> int:
        raise pickle.UnpicklingError("it has an array or a dtype for a key")


class _Dtype(_StandIn):
    """A dtype while its pickle is read: plain numbers and text only, no fields, no objects."""

    def __init__(self, code: str) -> None:
        if not isinstance(code, str):
            raise pickle.UnpicklingError("it holds an array of a dtype without a name")
        if not _DTYPE.fullmatch(code):
            raise pickle.UnpicklingError(f"it holds an array of dtype {code!r}; only numbers and text are admitted")
        self.value = np.dtype(code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, order, *composite = state[:5]
        if composite != [None, None, None]:
            raise pickle.UnpicklingError("it holds an array with named fields")
        self.value = self.value.newbyteorder(order)


class _Array(_StandIn):
    """An array while its pickle is read."""

    def __init__(self, value: NDArray[Any]) -> None:
        self.value = value

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, is_fortran, content = state
        content = content.encode("latin1") if isinstance(content, str) else content  # written by Python 2
        self.value = _array(content, dtype, shape, "F" if is_fortran else "C")


def _array(content: Any, dtype: Any, shape: Any, order: Any) -> NDArray[Any]:
    if not isinstance(dtype, _Dtype) or not isinstance(content, bytes | bytearray):
        raise pickle.UnpicklingError("an array in it does not consist of bytes of a dtype")
    if not isinstance(shape, tuple) or len(shape) > _MOST_DIMENSIONS or any(type(size) is not int for size in shape):
        raise pickle.UnpicklingError("an array in it has a shape that is none")
    if any(size < 0 for size in shape):
        raise pickle.UnpicklingError(f"an array in it has shape {shape}")
    if len(content) != math.prod(shape) * dtype.value.itemsize:
        raise pickle.UnpicklingError(f"an array in it has {len(content)} bytes and shape {shape}")
    array: NDArray[Any] = np.ndarray(shape, dtype.value, content, order="F" if order == "F" else "C")
    array.flags.writeable = False
    return array


def _empty_array(_subtype: Any, _shape: Any, _dtype: Any) -> _Array:
    """Where numpy would reserve memory of any shape: the state that follows says what the array is."""
    return _Array(np.zeros(0))


def _array_of_buffer(content: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    return _Array(_array(content, dtype, shape, order))


def _scalar(dtype: Any, content: Any) -> Any:
    content = content.encode("latin1") if isinstance(content, str) else content
    return _array(content, dtype, (), "C")[()]


def _dtype(code: Any, _align: Any = False, _copy: Any = False) -> _Dtype:
    return _Dtype(code)


def _latin1(text: str, encoding: str = "latin1") -> bytes:
    """How protocols 0 to 2 write bytes."""
    if encoding != "latin1":
        raise pickle.UnpicklingError("it encodes text in another way than latin1")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    """How protocols 0 to 2 write b""; with an argument, `bytes` would reserve any amount of memory."""
    return b""


def _subtype(*_: Any) -> None:
    raise pickle.UnpicklingError("it builds a bare ndarray")


ADMITTED: Allowed = {
    **{
        f"{module}.{kind.__name__}": kind
        for module in ("builtins", "__builtin__")
        for kind in (set, frozenset, complex)
    },
    "collections.OrderedDict": OrderedDict,
    "collections.deque": deque,
    "_codecs.encode": _latin1,
    "__builtin__.bytes": _no_bytes,
    "numpy.ndarray": _subtype,
    "numpy.dtype": _dtype,
    **{
        f"numpy.{core}.{name}": stand_in
        for core in ("core", "_core")
        for name, stand_in in (
            ("multiarray._reconstruct", _empty_array),
            ("multiarray.scalar", _scalar),
            ("numeric._frombuffer", _array_of_buffer),
        )
    },
}


def _refuse_bombs(stream: IO[bytes]) -> None:
    """Refuse tuples of tuples that a few bytes describe and no machine can hash: the unpickler hashes keys as it goes.

    Goes through the pickle as the unpickler will, with a `_Tuples` for everything it would hold.
    """
    stack: list[_Tuples | None] = []  # None is a mark
    memo: dict[Any, _Tuples | None] = {}
    for opcode, argument, _ in pickletools.genops(stream):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif opcode.name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif opcode.name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif opcode.name == "DUP":
            stack.append(stack[-1])
        elif opcode.name == "MARK":
            stack.append(None)
        else:
            taken = _taken(stack, opcode)
            made = _Tuples.around(taken) if opcode.name.startswith("TUPLE") else _NO_TUPLE
            stack.extend(made for _ in opcode.stack_after)


class _Tuples(NamedTuple):
    """What a value is made of as far as its hash goes: how deep its tuples lie, and how many there are."""

    depth: int
    total: int

    @classmethod
    def around(cls, entries: Sequence[_Tuples]) -> _Tuples:
        depth = 1 + max((entry.depth for entry in entries), default=0)
        total = 1 + sum(entry.total for entry in entries)
        if depth > _DEEPEST_TUPLE or total > _MOST_TUPLES_IN_ONE:
            raise pickle.UnpicklingError(f"a tuple in it is {depth} deep and of {total} tuples")
        return cls(depth, total)


_NO_TUPLE = _Tuples(0, 0)


def _taken(stack: list[_Tuples | None], opcode: pickletools.OpcodeInfo) -> list[_Tuples]:
    """What an opcode takes off the stack."""
    before = list(opcode.stack_before)
    taken: list[_Tuples] = []
    if pickletools.markobject in before:
        while (entry := stack.pop()) is not None:
            taken.append(entry)
        before = before[: before.index(pickletools.markobject)]
    taken += [entry for entry in (stack.pop() for _ in before) if entry is not None]
    return taken


def _settled(value: Any, done: dict[int, tuple[Any, Any]]) -> Any:
    """`value` with every stand-in replaced by what it stands for; containers that can change are changed in place.

    `done` has what was settled and what became of it, by id; it keeps the former, so that no id is given twice.
    """
    if isinstance(value, _Array | _Dtype):
        return value.value
    if id(value) in done:
        return done[id(value)][1]
    if isinstance(value, dict | list | deque | SimpleNamespace):
        done[id(value)] = value, value
        fields: Any = vars(value) if isinstance(value, SimpleNamespace) else value
        for key in range(len(fields)) if isinstance(fields, list | deque) else fields:
            fields[key] = _settled(fields[key], done)
    elif isinstance(value, tuple):
        done[id(value)] = value, tuple(_settled(entry, done) for entry in value)
        return done[id(value)][1]
    return value
