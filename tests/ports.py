"""Ports for servers that tests start."""

from __future__ import annotations

import random
import socket

_FIRST, _LAST = 20_000, 29_999
"""Below the ports that the kernel gives to connections (from 32,768 on), and above those of Ray's workers (10,002 to
19,999): one of these would take a port between the question and the server's start."""


def free_ports(count: int) -> list[int]:
    """As many, no two of them the same."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)


def free_port() -> int:
    """A port of loopback that nobody listens at."""
    while True:
        port = random.SystemRandom().randint(_FIRST, _LAST)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
