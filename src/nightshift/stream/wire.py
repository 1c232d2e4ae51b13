"""Frames over a socket: a fixed prefix, a small msgpack header and a binary payload. No pickle.

4 bytes  "NSS1"
4 bytes  length of the header, big-endian
8 bytes  length of the payload, big-endian
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgpack
import numpy as np

from nightshift.errors import StreamError
from nightshift.stream.message import Buffer

MAGIC = b"NSS1"
MAX_HEADER_BYTES = 16 * 2**10
MAX_PAYLOAD_BYTES = 4 * 2**30
DEFAULT_TIMEOUT = 30.0
"""Seconds that a frame may take, in addition to the time that its size allows."""
_MIN_BYTES_PER_SECOND = 2**20
"""A connection below this throughput times out."""
_MAX_KEPT_BYTES = 2**28
"""A connection does not keep larger receive buffers."""
_PREFIX = struct.Struct(">4sIQ")
_TIMEVAL = struct.Struct("ll")


class ConnectionClosed(StreamError):
    """The peer closed the connection between two frames."""


class ProtocolError(StreamError):
    """The peer sent something that is not a valid frame."""


class Channel:
    """One end of a connection; after any exception the connection must be closed."""

    def __init__(
        self, connection: socket.socket, *, timeout: float = DEFAULT_TIMEOUT, max_payload: int = MAX_PAYLOAD_BYTES
    ) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(
            None
        )  # SO_RCVTIMEO and SO_SNDTIMEO keep the deadlines, so that a large frame is one system call
        self._connection = connection
        self._timeout = timeout
        self.max_payload = max_payload
        self._buffers = [np.empty(0, np.uint8), np.empty(0, np.uint8)]

    def send(self, header: Mapping[str, Any], payload: Buffer = b"") -> None:
        head = msgpack.packb(dict(header))
        deadline = time.monotonic() + self.frame_timeout(len(payload))
        self._send_all(_PREFIX.pack(MAGIC, len(head), len(payload)) + head, deadline)
        self._send_all(payload, deadline)

    def receive(
        self,
        *,
        idle: float | None = None,
        max_payload: int | None = None,
        begun: Callable[[dict[str, Any], float], None] = lambda header, seconds: None,
    ) -> tuple[dict[str, Any], memoryview]:
        """Receive a frame, which must begin within `idle` seconds. Its payload is overwritten two frames later.

        `begun` is called with the header, and the seconds that the payload may take.
        """
        deadline = time.monotonic() + (self._timeout if idle is None else idle)
        prefix = self._receive_exactly(bytearray(_PREFIX.size), deadline, may_end=True)
        magic, head_size, size = _PREFIX.unpack(prefix)
        limit = self.max_payload if max_payload is None else max_payload
        if magic != MAGIC:
            raise ProtocolError(f"the frame begins with {bytes(magic)!r}, not {MAGIC!r}")
        if head_size > MAX_HEADER_BYTES or size > limit:
            raise ProtocolError(f"the frame has {head_size} + {size} bytes; {MAX_HEADER_BYTES} + {limit} are allowed")
        seconds = self.frame_timeout(size)
        deadline = time.monotonic() + seconds
        header = _unpack(self._receive_exactly(bytearray(head_size), deadline))
        begun(header, seconds)
        return header, self._receive_exactly(self._buffer(size), deadline)

    def close(self) -> None:
        self._connection.close()

    def frame_timeout(self, size: int) -> float:
        """Seconds that a frame with a payload of `size` bytes may take."""
        return self._timeout + size / _MIN_BYTES_PER_SECOND

    def _buffer(self, size: int) -> memoryview:
        """One of two receive buffers in turn, or a new one; np.empty does not commit memory before data arrives."""
        self._buffers.reverse()
        if size > _MAX_KEPT_BYTES:
            return np.empty(size, np.uint8).data
        if len(self._buffers[0]) < size:
            self._buffers[0] = np.empty(size, np.uint8)
        return self._buffers[0].data[:size]

    def _send_all(self, content: Buffer, deadline: float) -> None:
        view = memoryview(content)
        sent = 0
        while sent < len(view):
            self._set_timeout(socket.SO_SNDTIMEO, deadline)
            sent += self._connection.send(view[sent:])

    def _set_timeout(self, option: int, deadline: float) -> None:
        """Let the next socket call block until the deadline; then it returns what it has or raises BlockingIOError."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the peer is too slow")
        seconds, rest = divmod(max(int(left * 1e6), 1), 10**6)
        self._connection.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(seconds, rest))

    def _receive_exactly(self, target: bytearray | memoryview, deadline: float, *, may_end: bool = False) -> memoryview:
        view = memoryview(target)
        got = 0
        while got < len(view):
            self._set_timeout(socket.SO_RCVTIMEO, deadline)
            count = self._connection.recv_into(view[got:], 0, socket.MSG_WAITALL)
            if not count and may_end and not got:
                raise ConnectionClosed("the peer closed the connection")
            if not count:
                raise ProtocolError(f"the connection ended {len(view) - got} bytes too early")
            got += count
        return view


def str_field(header: Mapping[str, Any], name: str) -> str:
    return str(_typed(header, name, str))


def int_field(header: Mapping[str, Any], name: str) -> int:
    return int(_typed(header, name, int))


def bytes_field(header: Mapping[str, Any], name: str) -> bytes:
    return bytes(_typed(header, name, bytes))


def _typed(header: Mapping[str, Any], name: str, kind: type) -> Any:
    value = header.get(name)
    if type(value) is not kind:
        raise ProtocolError(f"{name} in the frame is {value!r:.80}, not {kind.__name__}")
    return value


def _unpack(content: memoryview) -> dict[str, Any]:
    try:
        header = msgpack.unpackb(content, strict_map_key=True)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise ProtocolError(f"the header of the frame is not msgpack: {error!r:.80}") from None
    if not isinstance(header, dict):
        raise ProtocolError(f"the header of the frame is not a map but {header!r:.80}")
    return header
