"""A restricted unpickler: reads numpy arrays, scalars and dtypes in plain containers, and nothing else.

A pickle is a program that can call any global that it names. Here it can name only `ALLOWED_GLOBALS`, and numpy's
constructors are replaced by ones that check their arguments, because numpy's own trust the shapes and sizes in a file.
A pickle cannot modify objects of this process. Arrays are read-only views of the bytes in the file. `pickle_work`
bounds the time and memory that unpickling takes.
"""

from __future__ import annotations

import math
import mmap
import pickle
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

from nightshift.data import pickle_work
from nightshift.errors import DataError

AllowedGlobals = Mapping[str, Callable[..., Any]]
"""Replacements for the classes and functions that a file may name, by dotted name; called with arguments of the file.

Only built-in classes are allowed, because a file can set the attributes of any other class.
"""

RECORD = SimpleNamespace
"""Replaces a class of plain fields: the fields become attributes, and no code of the class runs."""

UNPICKLING_ERRORS = (
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
"""Raised by Python for data that is truncated, damaged or not a pickle."""
_AGAIN = "copy the file again, or write it again where it was made"
_DTYPE = re.compile(r"[<>=|]?(b1|[iu][1248]|f[248]|c8|c16|[SU]\d{1,6})")
_MOST_DIMENSIONS = 32


def load(path: Path, allowed: AllowedGlobals | None = None) -> Any:
    """Load a pickle; DataError if it names a global that is neither in `ALLOWED_GLOBALS` nor in `allowed`."""
    size = path.stat().st_size
    if not size:
        raise DataError(f"{path} is not a readable pickle: it is empty", _AGAIN)
    with path.open("rb") as stream:
        with mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_READ) as view:
            check_work(cast(IO[bytes], view), size, str(path))
        return _load(stream, str(path), allowed or {})


def loads(content: bytes, name: str, allowed: AllowedGlobals | None = None) -> Any:
    """`load` for a pickle in memory; `name` identifies it in error messages."""
    check_work(BytesIO(content), len(content), name)
    return _load(BytesIO(content), name, allowed or {})


def check_work(stream: IO[bytes], size: int, name: str) -> None:
    """DataError if this pickle of `size` bytes would take too long to unpickle, or is none."""
    try:
        pickle_work.check(stream, size)
    except UNPICKLING_ERRORS as error:
        raise DataError(f"{name} is not a readable pickle: {error}", _AGAIN) from None


def _load(stream: IO[bytes], name: str, allowed: AllowedGlobals) -> Any:
    try:
        return _resolve(_Unpickler(stream, name, {**ALLOWED_GLOBALS, **allowed}).load(), {})
    except UNPICKLING_ERRORS as error:
        raise DataError(f"{name} is not a readable pickle: {error}", _AGAIN) from None


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: IO[bytes], name: str, allowed: AllowedGlobals) -> None:
        super().__init__(stream)
        self._name = name
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        try:
            found = self._allowed[f"{module}.{name}"]
        except KeyError:
            raise DataError(
                f"{self._name} is refused: it asks for {module}.{name}, and a pickle that names code can run it",
                "use the file only if you trust its origin, and convert it where it was made",
            ) from None
        return found if isinstance(found, type) else _ReadOnlyCallable(found)


class _ReadOnlyCallable:
    """A function that a file can call but not modify."""

    __slots__ = ("_function",)
    _function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "_function", function)

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __setattr__(self, name: str, value: Any) -> None:
        raise pickle.UnpicklingError("it modifies a function")


class _Placeholder:
    """Stands for an array or dtype while unpickling. Unhashable, since dict keys and set members cannot be replaced."""

    def __hash__(self) -> int:
        raise pickle.UnpicklingError("it uses an array or a dtype as a key")


class _Dtype(_Placeholder):
    """The placeholder of a dtype: only numbers and text, no structured or object dtypes."""

    def __init__(self, code: str) -> None:
        if not isinstance(code, str):
            raise pickle.UnpicklingError("it contains an array of a dtype without a name")
        if not _DTYPE.fullmatch(code):
            raise pickle.UnpicklingError(f"it contains an array of dtype {code!r}; only numbers and text are allowed")
        self.value = np.dtype(code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, order, *composite = state[:5]
        if composite != [None, None, None]:
            raise pickle.UnpicklingError("it contains an array with named fields")
        self.value = self.value.newbyteorder(order)


class _Array(_Placeholder):
    """The placeholder of an array."""

    def __init__(self, value: NDArray[Any]) -> None:
        self.value = value

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, is_fortran, content = state
        content = content.encode("latin1") if isinstance(content, str) else content  # written by Python 2
        self.value = _array(content, dtype, shape, "F" if is_fortran else "C")


def _array(content: Any, dtype: Any, shape: Any, order: Any) -> NDArray[Any]:
    if not isinstance(dtype, _Dtype) or not isinstance(content, bytes | bytearray):
        raise pickle.UnpicklingError("it contains an array that is not bytes of a dtype")
    if not isinstance(shape, tuple) or len(shape) > _MOST_DIMENSIONS or any(type(size) is not int for size in shape):
        raise pickle.UnpicklingError("it contains an array with an invalid shape")
    if any(size < 0 for size in shape):
        raise pickle.UnpicklingError(f"it contains an array of shape {shape}")
    if len(content) != math.prod(shape) * dtype.value.itemsize:
        raise pickle.UnpicklingError(f"it contains an array with {len(content)} bytes and shape {shape}")
    array: NDArray[Any] = np.ndarray(shape, dtype.value, content, order="F" if order == "F" else "C")
    array.flags.writeable = False
    return array


def _empty_array(_subtype: Any, _shape: Any, _dtype: Any) -> _Array:
    """Allocates nothing, where numpy would allocate any shape; the state that follows defines the array."""
    return _Array(np.zeros(0))


def _array_of_buffer(content: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    return _Array(_array(content, dtype, shape, order))


def _scalar(dtype: Any, content: Any) -> Any:
    content = content.encode("latin1") if isinstance(content, str) else content
    return _array(content, dtype, (), "C")[()]


def _dtype(code: Any, _align: Any = False, _copy: Any = False) -> _Dtype:
    return _Dtype(code)


def _latin1(text: str, encoding: str = "latin1") -> bytes:
    """Protocols 0 to 2 encode bytes with this function."""
    if encoding != "latin1":
        raise pickle.UnpicklingError("it encodes text in another encoding than latin1")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    """Protocols 0 to 2 encode b"" with `bytes()`, whose argument could allocate any amount of memory."""
    return b""


def _subtype(*_: Any) -> None:
    raise pickle.UnpicklingError("it builds a bare ndarray")


ALLOWED_GLOBALS: AllowedGlobals = {
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
        f"numpy.{core}.{name}": replacement
        for core in ("core", "_core")
        for name, replacement in (
            ("multiarray._reconstruct", _empty_array),
            ("multiarray.scalar", _scalar),
            ("numeric._frombuffer", _array_of_buffer),
        )
    },
}


def _resolve(value: Any, done: dict[int, tuple[Any, Any]]) -> Any:
    """Replace every placeholder in `value` by its array or dtype; mutable containers are modified in place.

    `done` maps the id of a container to the container and its result; holding the container keeps its id unique.
    """
    if isinstance(value, _Array | _Dtype):
        return value.value
    if id(value) in done:
        return done[id(value)][1]
    if isinstance(value, dict | list | deque | SimpleNamespace):
        done[id(value)] = value, value
        fields: Any = vars(value) if isinstance(value, SimpleNamespace) else value
        for key in range(len(fields)) if isinstance(fields, list | deque) else fields:
            fields[key] = _resolve(fields[key], done)
    elif isinstance(value, tuple):
        done[id(value)] = value, tuple(_resolve(entry, done) for entry in value)
        return done[id(value)][1]
    return value
