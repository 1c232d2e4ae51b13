"""Frames over a socket: a fixed prefix, a small msgpack map, and bytes. Nothing in them can name code.

4 bytes  "NSS1"
4 bytes  length of the map, big-endian
8 bytes  length of the bytes that follow it
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

from nightshift.errors import StreamError
from nightshift.stream.message import Buffer

MAGIC = b"NSS1"
LARGEST_HEADER = 16 * 2**10
LARGEST_PAYLOAD = 4 * 2**30
PATIENCE = 30.0
"""Seconds for a frame that is under way, on top of those its size allows."""
_SLOWEST = 2**20
"""Bytes per second below which the other side counts as gone."""
_PREFIX = struct.Struct(">4sIQ")
_TIMEVAL = struct.Struct("ll")


class Hangup(StreamError):
    """The other side closed the connection between two frames."""


class BrokenFrame(StreamError):
    """What came is not a frame of ours."""


class Channel:
    """One end of a connection. Whatever it raises, the connection is of no more use."""

    def __init__(
        self, connection: socket.socket, *, patience: float = PATIENCE, largest: int = LARGEST_PAYLOAD
    ) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)  # the system keeps the deadlines: a large frame is then one call, not hundreds
        self._connection = connection
        self._patience = patience
        self.largest = largest
        self._buffers = [np.empty(0, np.uint8), np.empty(0, np.uint8)]

    def send(self, header: Mapping[str, Any], payload: Buffer = b"") -> None:
        head = msgpack.packb(dict(header))
        deadline = time.monotonic() + self._allowed(len(payload))
        self._all(_PREFIX.pack(MAGIC, len(head), len(payload)) + head, deadline)
        self._all(payload, deadline)

    def receive(self, *, idle: float | None = None, largest: int | None = None) -> tuple[dict[str, Any], memoryview]:
        """The next frame; its bytes are good until the one after the next. `idle` seconds may pass before it begins."""
        deadline = time.monotonic() + (self._patience if idle is None else idle)
        prefix = self._exactly(bytearray(_PREFIX.size), deadline, may_end=True)
        magic, head_size, size = _PREFIX.unpack(prefix)
        limit = self.largest if largest is None else largest
        if magic != MAGIC:
            raise BrokenFrame(f"a frame begins with {bytes(magic)!r}, not {MAGIC!r}")
        if head_size > LARGEST_HEADER or size > limit:
            raise BrokenFrame(f"a frame of {head_size} + {size} bytes; {LARGEST_HEADER} + {limit} are allowed")
        deadline = time.monotonic() + self._allowed(size)
        header = _unpack(self._exactly(bytearray(head_size), deadline))
        return header, self._exactly(self._room(size), deadline)

    def close(self) -> None:
        self._connection.close()

    def _allowed(self, size: int) -> float:
        return self._patience + size / _SLOWEST

    def _room(self, size: int) -> memoryview:
        """Memory that is used in turns, and that a mere announcement does not fill."""
        self._buffers.reverse()
        if len(self._buffers[0]) < size:
            self._buffers[0] = np.empty(size, np.uint8)
        return self._buffers[0].data[:size]

    def _all(self, content: Buffer, deadline: float) -> None:
        view = memoryview(content)
        sent = 0
        while sent < len(view):
            self._limit(socket.SO_SNDTIMEO, deadline)
            sent += self._connection.send(view[sent:])

    def _limit(self, option: int, deadline: float) -> None:
        """Let the next call on the connection take until the deadline; it ends with what it has, or BlockingIOError."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the other side is too slow")
        seconds, rest = divmod(max(int(left * 1e6), 1), 10**6)
        self._connection.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(seconds, rest))

    def _exactly(self, target: bytearray | memoryview, deadline: float, *, may_end: bool = False) -> memoryview:
        view = memoryview(target)
        got = 0
        while got < len(view):
            self._limit(socket.SO_RCVTIMEO, deadline)
            count = self._connection.recv_into(view[got:], 0, socket.MSG_WAITALL)
            if not count and may_end and not got:
                raise Hangup("the other side closed the connection")
            if not count:
                raise BrokenFrame(f"the connection ended {len(view) - got} bytes too early")
            got += count
        return view


def text(header: Mapping[str, Any], name: str) -> str:
    return str(_typed(header, name, str))


def number(header: Mapping[str, Any], name: str) -> int:
    return int(_typed(header, name, int))


def octets(header: Mapping[str, Any], name: str) -> bytes:
    return bytes(_typed(header, name, bytes))


def _typed(header: Mapping[str, Any], name: str, kind: type) -> Any:
    value = header.get(name)
    if type(value) is not kind:
        raise BrokenFrame(f"a frame whose {name} is {value!r:.80}")
    return value


def _unpack(content: memoryview) -> dict[str, Any]:
    try:
        header = msgpack.unpackb(content, strict_map_key=True)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise BrokenFrame(f"a frame whose header is not msgpack: {error!r:.80}") from None
    if not isinstance(header, dict):
        raise BrokenFrame(f"a frame whose header is no map but {header!r:.80}")
    return header
