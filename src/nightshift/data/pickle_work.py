"""Bounds the work of unpickling, before anything is unpickled.

A pickle is a program for a stack machine. A few bytes of it can use a large object again as a key, which hashes it, or
as an argument, which copies it, so two megabytes can keep a process busy for minutes and fill any memory. `check` reads
the opcodes, keeps a `_Value` for every object on the stack, and adds up what its uses cost. Files that Python or torch
wrote cost at most a few units per byte, because they store every object once.
"""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import IO, Any

_UNITS_PER_BYTE = 4
_FREE_UNITS = 10_000
_COMPOUND_KEYS = 10_000
"""Units for hashing tuples, numpy scalars and the like in one file, whatever its size: their hashes can be made equal,
and then a dict of n of them takes n² steps. Texts have hashes that a file cannot foresee."""
_HASH_MODULUS = 2**61 - 1
"""Multiples of it are integers with the same hash."""
_BYTES_PER_UNIT = 64
_DEEPEST_TUPLE = 100
_MOST_TUPLES_IN_ONE = 10_000

_MEMOIZE = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")
_RECALL = ("GET", "BINGET", "LONG_BINGET")
_FILL = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS")
_COLLECT = ("LIST", "DICT", "FROZENSET")


@dataclass(slots=True)
class _Value:
    """An object on the stack of the unpickler."""

    size: int = 1  # units for copying it: bytes of a text, entries of a container
    hashing: int = 1  # units for hashing it or comparing it with an equal one
    is_compound: bool = False  # a key of this kind counts against _COMPOUND_KEYS
    depth: int = 0  # of nested tuples
    tuples: int = 0


_PLAIN = _Value()


def check(stream: IO[bytes], size: int) -> None:
    """Raise UnpicklingError if unpickling these `size` bytes costs too much; other errors if it is not a pickle.

    `stream` must not allocate more than it holds when more is asked of it; BytesIO and mmap do not.
    """
    meter = _Meter(size)
    stack: list[_Value | None] = []  # None is a MARK
    memo: dict[Any, _Value | None] = {}
    argument: Any
    for opcode, argument, _ in pickletools.genops(stream):
        name = opcode.name
        if name in _MEMOIZE:
            index: int = len(memo) if name == "MEMOIZE" else argument
            if not 0 <= index <= size:  # Python allocates a table of this length
                raise pickle.UnpicklingError(f"it memoizes an object under the number {index}")
            memo[index] = stack[-1]
        elif name in _RECALL:
            stack.append(memo[argument])
        elif name == "DUP":
            stack.append(stack[-1])
        elif name == "MARK":
            stack.append(None)
        elif name == "FRAME" and argument > size:
            raise pickle.UnpicklingError(f"it has a frame of {argument} bytes")
        elif opcode.stack_before:
            made = _applied(name, _popped(stack, opcode), meter)
            stack.extend(made for _ in opcode.stack_after)
        else:
            stack.extend(_pushed(name, argument) for _ in opcode.stack_after)


class _Meter:
    """Adds up units of work."""

    def __init__(self, size: int) -> None:
        self._left = _UNITS_PER_BYTE * size + _FREE_UNITS
        self._compound = _COMPOUND_KEYS

    def spend(self, units: int) -> None:
        self._left -= units
        if self._left < 0:
            raise pickle.UnpicklingError("it uses its objects so often that reading it would take too long")

    def hash(self, keys: Iterable[_Value]) -> None:
        for key in keys:
            self.spend(key.hashing)
            if key.is_compound:
                self._compound -= key.hashing
        if self._compound < 0:
            raise pickle.UnpicklingError("it uses too many tuples, large integers or objects as keys")


def _pushed(name: str, argument: Any) -> _Value:
    """The value of an opcode without arguments on the stack: a literal, a global or an empty container."""
    if name in ("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"):
        return _Value()
    if isinstance(argument, str | bytes | bytearray):
        return _Value(size=len(argument), hashing=1 + len(argument) // _BYTES_PER_UNIT)
    if isinstance(argument, int) and abs(argument) >= _HASH_MODULUS:
        return _Value(size=argument.bit_length(), hashing=argument.bit_length(), is_compound=True)
    return _PLAIN


def _applied(name: str, taken: Sequence[_Value], meter: _Meter) -> _Value:
    """The result of an opcode; `taken` has its arguments, the last first."""
    if "TUPLE" in name:
        return _tuple(taken)
    if name in _FILL:
        *entries, container = taken
        _fill(name, entries, container, meter)
        return container
    if name in _COLLECT:
        container = _Value(is_compound=name == "FROZENSET")
        _fill(name, taken, container, meter)
        return container
    called = 0 if name == "INST" else 1  # the function or object that the arguments are given to
    units = sum(value.size for value in taken[: len(taken) - called])
    meter.spend(units)
    return taken[-1] if name == "BUILD" else _Value(size=1 + units, hashing=1 + units, is_compound=True)


def _fill(name: str, entries: Sequence[_Value], container: _Value, meter: _Meter) -> None:
    if name in ("SETITEM", "SETITEMS", "DICT"):
        entries = entries[1::2]
        meter.hash(entries)
    elif name in ("ADDITEMS", "FROZENSET"):
        meter.hash(entries)
    container.size += sum(1 + entry.hashing for entry in entries)
    container.hashing = container.size


def _tuple(entries: Sequence[_Value]) -> _Value:
    depth = 1 + max((entry.depth for entry in entries), default=0)
    tuples = 1 + sum(entry.tuples for entry in entries)
    if depth > _DEEPEST_TUPLE or tuples > _MOST_TUPLES_IN_ONE:
        raise pickle.UnpicklingError(f"it contains a tuple of depth {depth} with {tuples} tuples")
    return _Value(
        size=1 + sum(entry.size for entry in entries),
        hashing=1 + sum(entry.hashing for entry in entries),
        is_compound=True,
        depth=depth,
        tuples=tuples,
    )


def _popped(stack: list[_Value | None], opcode: pickletools.OpcodeInfo) -> list[_Value]:
    """Pop the arguments of an opcode from the stack."""
    before = list(opcode.stack_before)
    taken: list[_Value] = []
    if pickletools.markobject in before:
        while (entry := stack.pop()) is not None:
            taken.append(entry)
        before = before[: before.index(pickletools.markobject)]
    taken += [entry for entry in (stack.pop() for _ in before) if entry is not None]
    return taken
