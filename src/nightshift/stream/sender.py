"""Sends the episodes of a spool to the learner and fetches new weights, in a background thread."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterator

from nightshift.closing import Closing
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


class Sender(Closing):
    """Retries with exponential backoff while the link is down or the learner defers what it is sent.

    `Spool.put` raises the error that stops the thread.
    """

    def __init__(self, spool: Spool, link: Link, *, poll_interval: float = 1.0, max_backoff: float = 5.0) -> None:
        """`poll_interval`: seconds between polls for weights while idle or deferred; `max_backoff`: between retries."""
        self._spool = spool
        self._link = link
        self._poll_interval = poll_interval
        self._max_backoff = max_backoff
        self._latest_weights: Weights | None = None
        self._failures = 0  # since the last progress
        self._deferred = ""
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
            self._spool.set_obstacle(error.what, is_link_failure=True)
            if not self._failures:
                _log.warning("%s; episodes stay in the spool until it is back", error.what)
            self._back_off(self._max_backoff)
        else:
            self._spool.set_obstacle(self._deferred)
            if self._deferred:
                self._back_off(self._poll_interval)
            else:
                self._failures = 0
                self._spool.wait_for_work(self._poll_interval, self._stop)

    def _back_off(self, longest: float) -> None:
        backoff = min(longest, _FIRST_BACKOFF * 2 ** min(self._failures, 10))
        self._failures += 1
        self._stop.wait(backoff * random.uniform(0.5, 1))

    def _send_batch(self) -> None:
        """Send until the learner defers a message; those in flight are still acknowledged."""
        self._deferred = ""
        for ack in self._link.send(self._messages()):
            self._spool.handle_ack(ack)
            if ack.outcome == "deferred":
                self._deferred = ack.reason
            else:  # progress, so a link that fails once per message is retried without backoff
                self._failures = 0

    def _messages(self) -> Iterator[Message]:
        for message in self._spool.unacknowledged(BATCH_SIZE):
            if self._stop.is_set() or self._deferred:
                return
            yield message
