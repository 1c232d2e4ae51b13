"""A process that was started hands over to one that is forked from a process with torch imported, and that goes on in
its place: with the same arguments, variables, folder and streams.

In a new interpreter a Ray worker, a learner's rank or a stage needs three to five seconds of CPU before it does
anything, and the tests start dozens. What only a new interpreter shows is tested with one.

Ray starts this file as its worker program, so nothing is imported here that is not in Python.
"""

import os
import pickle
import socket
import sys
from collections.abc import Mapping, Sequence

ADDRESS_VARIABLE = "NIGHTSHIFT_TEST_RAY_WORKERS"
_STREAMS = (0, 1, 2)


def hand_over(
    server: socket.socket,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: str,
    streams: Sequence[int] = _STREAMS,
) -> None:
    """To the process at the other end."""
    socket.send_fds(server, [b" "], streams)
    server.sendall(pickle.dumps((list(arguments), dict(environment), folder)))
    server.shutdown(socket.SHUT_WR)


def take_over(connection: socket.socket) -> list[str]:
    """All but the arguments, which are returned."""
    _, streams, _, _ = socket.recv_fds(connection, 1, len(_STREAMS))
    for stream, number in zip(streams, _STREAMS, strict=True):
        os.dup2(stream, number)
        os.close(stream)
    with connection, connection.makefile("rb") as sent:
        arguments, environment, folder = pickle.load(sent)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    return list(arguments)


if __name__ == "__main__":
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ[ADDRESS_VARIABLE])
        hand_over(server, sys.argv[1:], os.environ, os.getcwd())
