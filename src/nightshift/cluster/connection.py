"""The Ray cluster that workers live on: joined at RAY_ADDRESS, or a small one started here; and its room for them."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import ray

from nightshift.errors import RolloutError

ADDRESS_VARIABLE = "RAY_ADDRESS"
REMIND_SECONDS = 60.0
_OBJECT_STORE_BYTES = 256 * 2**20
_KNOCK_SECONDS = 10.0
_LOOK_AGAIN_SECONDS = 1.0
_START_ONE = "start it (ray start --head, docs/cluster.md), or unset RAY_ADDRESS to work on this machine alone"
_FEWER = (
    "machine.workers is %d, one CPU each, and the cluster has %d of them: the run goes on with these and takes up more "
    "as they come (ray status shows the nodes)"
)
_NONE = (
    "machine.workers is %d, one CPU each, and the cluster has none: waiting for the first (ray status shows the nodes)"
)

_log = logging.getLogger(__name__)


def start_ray(workers: int) -> None:
    """Join the cluster at RAY_ADDRESS, or start a small one here."""
    if ray.is_initialized():
        return
    address = os.environ.get(ADDRESS_VARIABLE)
    with _our_signal_handlers():
        if address:
            _join(address)
            return
        ray.init(
            "local",  # also where somebody runs a cluster on this machine: it was not asked for
            num_cpus=workers,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level="error",
        )


@contextlib.contextmanager
def _our_signal_handlers() -> Iterator[None]:
    """Ray puts its own in their place, also where it fails to start; it must not keep them there."""
    main = threading.current_thread() is threading.main_thread()
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)} if main else {}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class Room:
    """How many workers the cluster has room for. It may have less than was asked for, grow and shrink.

    Only who has a CPU is given work: a worker that waits for one would keep its request waiting too.
    """

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.workers = wanted
        """As many as had room at the last look."""
        self._asked = self._reminded = -REMIND_SECONDS
        self._wishes: list[Any] = []

    def look(self) -> int:
        """At least one: as long as there is no CPU at all this waits, and says so."""
        while not (fits := min(self.wanted, _cpus())):
            if _is_due(self._reminded):
                self._reminded = time.monotonic()
                _log.warning(_NONE, self.wanted)
            self.workers = 0
            self.ask_for_more()
            time.sleep(_LOOK_AGAIN_SECONDS)
        if fits not in (self.workers, self.wanted):
            _log.warning(_FEWER, self.wanted, fits)
        self.workers = fits
        return fits

    def ask_for_more(self) -> None:
        """Ask for the CPUs that are missing by tasks that need one and do nothing: an autoscaler counts those.

        Call it when all workers that have room are started: else the wishes come true on the workers' CPUs.
        """
        if self.workers == self.wanted or not _is_due(self._asked):
            return
        self._asked = time.monotonic()
        if self._wishes:
            _, self._wishes = ray.wait(self._wishes, num_returns=len(self._wishes), timeout=0)
        wish = ray.remote(num_cpus=1)(_nothing)
        self._wishes += [wish.remote() for _ in range(self.wanted - self.workers - len(self._wishes))]


def _is_due(last: float) -> bool:
    return time.monotonic() - last > REMIND_SECONDS


def _nothing() -> None:
    """What a wish does when it has come true."""


def _cpus() -> int:
    return int(ray.cluster_resources().get("CPU", 0))


def _join(address: str) -> None:
    _knock(address)
    try:
        ray.init(log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise RolloutError(
            f"the Ray cluster at RAY_ADDRESS={address} cannot be joined: {reason}",
            "run on a node of the cluster, with its versions of Python and Ray and its token (docs/cluster.md)",
        ) from error


def _knock(address: str) -> None:
    """Find out at once whether anybody listens: Ray itself would try for a quarter of an hour."""
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdigit():  # Ray itself knows what to say
        return
    try:
        with contextlib.closing(socket.create_connection((host.strip("[]"), int(port)), _KNOCK_SECONDS)):
            return
    except OSError as error:
        raise RolloutError(f"no Ray cluster answers at RAY_ADDRESS={address}: {error}", _START_ONE) from error
