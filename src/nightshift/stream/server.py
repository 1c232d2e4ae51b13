"""The TCP server of a learner: one thread per connection, and a timeout on every receive and send."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from nightshift.access import check_token
from nightshift.closing import Closing
from nightshift.errors import DataError, NightshiftError, StreamError
from nightshift.stream.handshake import AuthenticationError, server_handshake
from nightshift.stream.link import LearnerEndpoint
from nightshift.stream.message import Message, MessageHeader
from nightshift.stream.wire import (
    DEFAULT_TIMEOUT,
    MAX_PAYLOAD_BYTES,
    Channel,
    ConnectionClosed,
    ProtocolError,
    int_field,
    str_field,
)

IDLE_TIMEOUT = 300.0
"""Seconds without a request after which a connection is closed; a running actor polls for weights every second."""
MAX_CONNECTIONS = 128
"""Of peers that have proved that they know the token, or need none."""
MAX_HANDSHAKES = 32
"""Of peers that have not yet."""
HANDSHAKE_TIMEOUT = 10.0
"""Seconds that each frame of a handshake may take: strangers must not keep actors out for long."""
_MAX_REASON_LENGTH = 2000

_log = logging.getLogger(__name__)


class Server(Closing):
    def __init__(
        self,
        endpoint: LearnerEndpoint,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        max_payload: int = MAX_PAYLOAD_BYTES,
    ) -> None:
        """Listen at `host`; any host but loopback requires a `token`. Port 0 takes any free port."""
        check_token(token)
        self._endpoint = endpoint
        self._token = token
        self._open = partial(Channel, max_payload=max_payload)
        self._timeout = timeout
        self._listener = _listen(host, port, token)
        self._connections: set[socket.socket] = set()
        self._handshakes: set[socket.socket] = set()  # those of them that have not proved themselves
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._closing = False
        self._acceptor = threading.Thread(target=self._accept, name="learner accepts", daemon=True)
        self._acceptor.start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Close all connections, after episodes that are being stored have been committed."""
        self._closing = True
        _shut_down(self._listener)
        self._acceptor.join()
        self._listener.close()
        with self._lock:
            threads = list(self._threads)
            for connection in self._connections:
                _shut_down(connection)
        for thread in threads:
            thread.join()

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection, peer = self._listener.accept()
            except OSError as error:
                if not self._closing:
                    _log.warning("a connection could not be accepted: %s", error)
                    threading.Event().wait(0.1)  # most likely out of file descriptors: wait until a connection closes
                continue
            self._start_thread(connection, f"{peer[0]}:{peer[1]}")

    def _start_thread(self, connection: socket.socket, peer: str) -> None:
        with self._lock:
            proved = len(self._connections) - len(self._handshakes)
            if self._closing or proved >= MAX_CONNECTIONS or len(self._handshakes) >= MAX_HANDSHAKES:
                _log.warning("refused the connection of %s: %d are connected", peer, len(self._connections))
                connection.close()
                return
            thread = threading.Thread(target=self._serve, args=(connection, peer), name=f"actor {peer}", daemon=True)
            self._connections.add(connection)
            self._handshakes.add(connection)
            self._threads.add(thread)
        thread.start()

    def _serve(self, connection: socket.socket, peer: str) -> None:
        try:
            timeout = min(self._timeout, HANDSHAKE_TIMEOUT)
            server_handshake(self._open(connection, timeout=timeout), self._token, self._endpoint.incarnation)
            with self._lock:
                self._handshakes.discard(connection)
            self._answer_requests(self._open(connection, timeout=self._timeout), connection)
        except ConnectionClosed:
            pass
        except (ProtocolError, AuthenticationError, OSError, MemoryError) as error:
            if not self._closing:
                _log.warning("closed the connection of %s: %s", peer, error)
        finally:
            connection.close()
            with self._lock:
                self._connections.discard(connection)
                self._handshakes.discard(connection)
                self._threads.discard(threading.current_thread())

    def _answer_requests(self, channel: Channel, connection: socket.socket) -> None:
        """Answer requests in order; the next request is received while the last one is being answered."""

        def note(request: dict[str, Any], seconds: float) -> None:
            if actor := str_field(request, "actor"):
                self._endpoint.roster.note_transfer(actor, seconds, channel)

        def answer(request: dict[str, Any], payload: memoryview) -> None:
            try:
                self._answer(channel, request, payload)
            except BaseException:
                _shut_down(connection)
                raise

        name = f"{threading.current_thread().name} answers"
        with contextlib.ExitStack() as at_end, ThreadPoolExecutor(1, name) as answering:
            at_end.callback(self._endpoint.roster.note_end, channel)
            last = answering.submit(lambda: None)
            try:
                while not self._closing:
                    request, payload = channel.receive(idle=IDLE_TIMEOUT, begun=note)
                    last.result()
                    last = answering.submit(answer, request, payload)
            finally:
                last.result()

    def _answer(self, channel: Channel, request: dict[str, Any], payload: memoryview) -> None:
        try:
            match str_field(request, "ask"):
                case "store":
                    self._store(channel, request, payload)
                case "weights":
                    self._send_weights(channel, int_field(request, "newer_than"), str_field(request, "actor"))
                case other:
                    raise ProtocolError(f"the frame has an unknown request {other!r:.80}")
        except (ProtocolError, OSError):
            raise
        except NightshiftError as error:  # an error of the learner: the actor keeps the episode and retries
            _log.error("%s", error)
            channel.send({"error": error.what[:_MAX_REASON_LENGTH]})

    def _store(self, channel: Channel, request: dict[str, Any], payload: memoryview) -> None:
        try:
            header = MessageHeader.from_key(str_field(request, "key"))
        except DataError as error:
            raise ProtocolError(error.what) from None
        ack = self._endpoint.inbox.receive(Message(header, payload))
        channel.send({"outcome": ack.outcome, "reason": ack.reason[:_MAX_REASON_LENGTH]})

    def _send_weights(self, channel: Channel, newer_than: int, actor: str) -> None:
        weights = self._endpoint.publisher.latest(newer_than)
        if weights is None:
            channel.send({"version": None})
        else:
            if actor:
                self._endpoint.roster.note_transfer(actor, channel.frame_timeout(len(weights.content)), channel)
            channel.send({"version": weights.version}, weights.content)
        if actor:
            self._endpoint.roster.note(actor, weights.version if weights else newer_than)


def _listen(host: str, port: int, token: str | None) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        if token is None and not ipaddress.ip_address(address[0]).is_loopback:
            raise StreamError(
                f"a learner that listens at {host} can be reached from other machines without a token",
                "give it and its actors a token, or listen at 127.0.0.1",
            )
        return socket.create_server(address[:2], family=family, backlog=MAX_CONNECTIONS)
    except OSError as error:
        raise StreamError(f"the learner cannot listen at {host}:{port}: {error}", "choose another port") from error


def _shut_down(connection: socket.socket) -> None:
    """Shut the socket down, which also wakes a thread blocked on it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
