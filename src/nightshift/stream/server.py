"""A learner that listens: a thread for whoever connects, and a deadline for everything anyone is waited for."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from nightshift.errors import DataError, NightshiftError, StreamError
from nightshift.stream.handshake import NotTrusted, check_token, greet
from nightshift.stream.link import Desk
from nightshift.stream.message import Label, Parcel
from nightshift.stream.wire import LARGEST_PAYLOAD, PATIENCE, BrokenFrame, Channel, Hangup, number, text

IDLE_SECONDS = 300.0
"""An actor that asks for nothing for so long is gone: a living one asks for weights all the time."""
MOST_CONNECTIONS = 128
_LONGEST_REASON = 2000

_log = logging.getLogger(__name__)


class Server:
    def __init__(
        self,
        desk: Desk,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        patience: float = PATIENCE,
        largest: int = LARGEST_PAYLOAD,
    ) -> None:
        """Listen at `host`, which needs a `token` unless only this machine can reach it; port 0 is any free one."""
        check_token(token)
        self._desk = desk
        self._token = token
        self._open = partial(Channel, patience=patience, largest=largest)
        self._listener = _listen(host, port, token)
        self._connections: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._closing = False
        self._acceptor = threading.Thread(target=self._accept, name="learner accepts", daemon=True)
        self._acceptor.start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Hang up on everyone; an episode that is being stored is stored first."""
        self._closing = True
        _shut(self._listener)
        self._acceptor.join()
        self._listener.close()
        with self._lock:
            threads = list(self._threads)
            for connection in self._connections:
                _shut(connection)
        for thread in threads:
            thread.join()

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection, peer = self._listener.accept()
            except OSError as error:
                if not self._closing:
                    _log.warning("a connection could not be accepted: %s", error)
                    threading.Event().wait(0.1)  # out of file descriptors, most likely: others will be given back
                continue
            self._take(connection, f"{peer[0]}:{peer[1]}")

    def _take(self, connection: socket.socket, peer: str) -> None:
        with self._lock:
            if self._closing or len(self._connections) >= MOST_CONNECTIONS:
                _log.warning("%s was turned away: %d are connected", peer, len(self._connections))
                connection.close()
                return
            thread = threading.Thread(target=self._serve, args=(connection, peer), name=f"actor {peer}", daemon=True)
            self._connections.add(connection)
            self._threads.add(thread)
        thread.start()

    def _serve(self, connection: socket.socket, peer: str) -> None:
        try:
            channel = self._open(connection)
            greet(channel, self._token)
            self._converse(channel, connection)
        except Hangup:
            pass
        except (BrokenFrame, NotTrusted, OSError, MemoryError) as error:
            if not self._closing:
                _log.warning("hung up on %s: %s", peer, error)
        finally:
            connection.close()
            with self._lock:
                self._connections.discard(connection)
                self._threads.discard(threading.current_thread())

    def _converse(self, channel: Channel, connection: socket.socket) -> None:
        """One request is answered while the next one is on its way; answers keep the order of requests."""

        def answer(request: dict[str, Any], payload: memoryview) -> None:
            try:
                self._answer(channel, request, payload)
            except BaseException:
                _shut(connection)
                raise

        with ThreadPoolExecutor(1, f"{threading.current_thread().name} answers") as answering:
            last = answering.submit(lambda: None)
            try:
                while not self._closing:
                    request, payload = channel.receive(idle=IDLE_SECONDS)
                    last.result()
                    last = answering.submit(answer, request, payload)
            finally:
                last.result()

    def _answer(self, channel: Channel, request: dict[str, Any], payload: memoryview) -> None:
        try:
            match text(request, "ask"):
                case "store":
                    self._store(channel, request, payload)
                case "weights":
                    self._give(channel, number(request, "newer_than"))
                case other:
                    raise BrokenFrame(f"a frame that asks for {other!r:.80}")
        except (BrokenFrame, OSError):
            raise
        except NightshiftError as error:  # ours to mend: the actor keeps what it has and tries again
            _log.error("%s", error)
            channel.send({"error": error.what[:_LONGEST_REASON]})

    def _store(self, channel: Channel, request: dict[str, Any], payload: memoryview) -> None:
        try:
            label = Label.of_key(text(request, "key"))
        except DataError as error:
            raise BrokenFrame(error.what) from None
        receipt = self._desk.inbox.receive(Parcel(label, payload))
        channel.send({"outcome": receipt.outcome, "reason": receipt.reason[:_LONGEST_REASON]})

    def _give(self, channel: Channel, newer_than: int) -> None:
        weights = self._desk.publisher.newest(newer_than)
        if weights is None:
            channel.send({"version": None})
        else:
            channel.send({"version": weights.version}, weights.content)


def _listen(host: str, port: int, token: str | None) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        if token is None and not ipaddress.ip_address(address[0]).is_loopback:
            raise StreamError(
                f"a learner that listens at {host} can be reached from other machines",
                "give it and its actors a token, or listen at 127.0.0.1",
            )
        return socket.create_server(address[:2], family=family, backlog=MOST_CONNECTIONS)
    except OSError as error:
        raise StreamError(f"the learner cannot listen at {host}:{port}: {error}", "choose another port") from error


def _shut(connection: socket.socket) -> None:
    """Wake the thread that waits for it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
