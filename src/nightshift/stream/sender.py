"""Sends the episodes of a spool to the learner and fetches new weights, in a background thread."""

from __future__ import annotations

import itertools
import logging
import random
import threading
from collections.abc import Iterator

from nightshift.data.episode import NO_POLICY
from nightshift.errors import NightshiftError
from nightshift.stream.link import Link, LinkDown
from nightshift.stream.message import Message
from nightshift.stream.spool import Spool
from nightshift.stream.weights import Weights

BATCH_SIZE = 16
"""Messages sent between two polls for newer weights."""
_FIRST_BACKOFF = 0.1

_log = logging.getLogger(__name__)


class Sender:
    """Retries with exponential backoff while the link is down. `Spool.put` raises the error that stops the thread."""

    def __init__(self, spool: Spool, link: Link, *, poll_interval: float = 1.0, max_backoff: float = 5.0) -> None:
        """`poll_interval`: seconds between polls for weights while idle; `max_backoff`: between retries, at most."""
        self._spool = spool
        self._link = link
        self._poll_interval = poll_interval
        self._max_backoff = max_backoff
        self._latest_weights: Weights | None = None
        self._failures = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)
        self._thread.start()

    @property
    def latest_weights(self) -> Weights | None:
        """The weights that were fetched last; does not block."""
        return self._latest_weights

    @property
    def version(self) -> int:
        return self._latest_weights.version if self._latest_weights else NO_POLICY

    def close(self) -> None:
        """Stop after the message in flight. To send everything first, call `Spool.wait_until_empty`."""
        self._stop.set()
        self._spool.wake()
        self._thread.join()
        self._link.close()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._send_and_poll()
        except (NightshiftError, OSError) as error:
            self._spool.fail(error)
        except BaseException as error:
            self._spool.fail(error)
            raise

    def _send_and_poll(self) -> None:
        try:
            self._send_batch()
            self._latest_weights = self._link.weights(self.version) or self._latest_weights
        except LinkDown as error:
            self._spool.set_link_error(error.what)
            if not self._failures:
                _log.warning("%s; episodes stay in the spool until it is back", error.what)
            backoff = min(self._max_backoff, _FIRST_BACKOFF * 2 ** min(self._failures, 10))
            self._failures += 1
            self._stop.wait(backoff * random.uniform(0.5, 1))
        else:
            self._spool.set_link_error("")
            self._failures = 0
            self._spool.wait_for_work(self._poll_interval, self._stop)

    def _send_batch(self) -> None:
        for ack in self._link.send(self._messages()):
            self._spool.handle_ack(ack)
            self._failures = 0  # an ack is progress, so a link that fails once per message is retried without backoff

    def _messages(self) -> Iterator[Message]:
        return itertools.takewhile(lambda _: not self._stop.is_set(), self._spool.unacknowledged(BATCH_SIZE))
