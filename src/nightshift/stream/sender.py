"""Carries what waits in a spool to the learner and brings weights back, in a thread of its own."""

from __future__ import annotations

import itertools
import logging
import random
import threading
from collections.abc import Iterator

from nightshift.data.episode import NO_POLICY
from nightshift.errors import NightshiftError
from nightshift.stream.link import Link, LinkDown
from nightshift.stream.message import Parcel
from nightshift.stream.spool import Spool
from nightshift.stream.weights import Weights

ROUND = 16
"""Parcels between two questions for newer weights."""
_FIRST_PAUSE = 0.1

_log = logging.getLogger(__name__)


class Courier:
    """While the link is down it tries again, ever more slowly; an error that ends it is raised by the spool's `put`."""

    def __init__(self, spool: Spool, link: Link, *, ask_every: float = 1.0, longest_pause: float = 5.0) -> None:
        """In seconds: how often to ask for weights while nothing is to be sent, and to try a link that is down."""
        self._spool = spool
        self._link = link
        self._ask_every = ask_every
        self._longest_pause = longest_pause
        self._newest: Weights | None = None
        self._failures = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="courier", daemon=True)
        self._thread.start()

    @property
    def newest(self) -> Weights | None:
        """The newest weights that are here; never waits."""
        return self._newest

    @property
    def version(self) -> int:
        return self._newest.version if self._newest else NO_POLICY

    def close(self) -> None:
        """Stop after the parcel that is under way. To send everything first, call the spool's `await_empty`."""
        self._stop.set()
        self._spool.wake()
        self._thread.join()
        self._link.close()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._round()
        except (NightshiftError, OSError) as error:
            self._spool.fail(error)
        except BaseException as error:
            self._spool.fail(error)
            raise

    def _round(self) -> None:
        try:
            self._deliver()
            self._newest = self._link.weights(self.version) or self._newest
        except LinkDown as error:
            self._spool.hinder(error.what)
            if not self._failures:
                _log.warning("%s; episodes wait in the spool", error.what)
            pause = min(self._longest_pause, _FIRST_PAUSE * 2 ** min(self._failures, 10))
            self._failures += 1
            self._stop.wait(pause * random.uniform(0.5, 1))
        else:
            self._spool.hinder("")
            self._failures = 0
            self._spool.await_work(self._ask_every, self._stop)

    def _deliver(self) -> None:
        for receipt in self._link.send(self._parcels()):
            self._spool.settle(receipt)
            self._failures = 0  # a link that breaks after every parcel still carries every parcel

    def _parcels(self) -> Iterator[Parcel]:
        return itertools.takewhile(lambda _: not self._stop.is_set(), self._spool.waiting(ROUND))
