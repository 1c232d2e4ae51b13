"""An actor, a learner and the cable between them, as processes to be killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from nightshift.data.episode import Episode
from nightshift.stream.message import Ack
from nightshift.stream.sender import Sender
from nightshift.stream.server import Server
from nightshift.stream.spool import Spool, SpoolLimits
from nightshift.stream.tcp_link import TcpLink
from nightshift.stream.weights import WeightPublisher
from tests.data.examples import make
from tests.stream.parts import RUN, open_endpoint
from tests.waiting import SECONDS

STEPS = 400
CUT_AFTER = 200_000
"""Bytes that the cable carries before it breaks, on average: a few episodes, and then a part of one."""


def episode(actor: str, seed: int) -> Episode:
    """The `seed`th episode of an actor, before it has an episode ID."""
    made = make(steps=STEPS, seed=seed)
    return replace(made, metadata={"actor": actor, "seed": seed})


def learner(folder: Path, port: int) -> None:
    """Stores episodes and publishes new weights continuously."""
    endpoint = open_endpoint(folder)
    server = Server(endpoint, port=port, timeout=5)
    while server.port:
        next_version = endpoint.publisher.version + 1
        _journal(folder / "announced", str(next_version))  # an actor may have it before it is known to be published
        version = endpoint.publisher.publish({"w": np.full(7, next_version, np.float32)})
        _journal(folder / "published", str(version))
        time.sleep(0.05)


class Recording(Spool):
    """Logs every ack before the spool deletes the episode."""

    def handle_ack(self, ack: Ack) -> None:
        _journal(self._folder / "acks", f"{ack.header.key} {ack.outcome}")
        super().handle_ack(ack)


def actor(folder: Path, port: int, enough: Path) -> None:
    """Puts episodes until there is a file `enough`. It goes on after those that it put before it was killed, with at
    least one: the kill may have come between an episode and its line in the journal."""
    spool = Recording(folder, run=RUN, actor=folder.name, limits=SpoolLimits(max_episodes=8, timeout=SECONDS))
    sender = Sender(spool, TcpLink("127.0.0.1", port, timeout=5), poll_interval=0.05, max_backoff=0.2)
    journal = folder / "put"
    seed = len(journal.read_text().splitlines()) if journal.exists() else 0
    while True:
        episode_id = spool.put(episode(folder.name, seed))
        _journal(folder / "acted", str(sender.version))
        _journal(journal, episode_id.key)
        if enough.exists():
            break
        seed += 1
    spool.wait_until_empty(timeout=SECONDS)
    sender.close()


def cable(port: int, learner_port: int) -> None:
    """Passes bytes on, and breaks now and then in the middle of a frame."""
    listener = socket.create_server(("127.0.0.1", port))
    while True:
        near, _ = listener.accept()
        threading.Thread(target=_connect, args=(near, learner_port), daemon=True).start()


def _connect(near: socket.socket, port: int) -> None:
    try:
        far = socket.create_connection(("127.0.0.1", port), 5)
    except OSError:
        near.close()
        return
    left = [random.expovariate(1 / CUT_AFTER)]
    back = threading.Thread(target=_pass_on, args=(far, near, left), daemon=True)
    back.start()
    _pass_on(near, far, left)


def _pass_on(source: socket.socket, target: socket.socket, left: list[float]) -> None:
    with contextlib.suppress(OSError):
        while left[0] > 0 and (data := source.recv(8192)):
            target.sendall(data[: max(1, int(left[0]))])
            left[0] -= len(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def play(log: Path, role: Callable[..., None], *arguments: object) -> None:
    """The entry point of a process: runs a role with its output in a log file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    role(*arguments)


def _journal(path: Path, line: str) -> None:
    with path.open("a") as stream:
        stream.write(line + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def publish_and_die(folder: Path, event: int) -> None:
    """Publishes weights and is killed at the `event`th system call that Python reports on the way."""
    publisher = WeightPublisher(folder)
    seen = 0

    def hook(name: str, arguments: object) -> None:
        nonlocal seen
        if name.startswith(("open", "os.")):
            seen += 1
            if seen == event:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    publisher.publish({"w": np.full(1000, publisher.version + 1, np.float32)})
