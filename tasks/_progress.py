"""How far a stage is, on Prefect's page while it runs: a progress artifact with iteration, success and time left."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
from collections.abc import Iterator
from typing import cast
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact

from nightshift.pipeline.summary import clock
from nightshift.telemetry import progress
from nightshift.telemetry.progress import Update

logger = logging.getLogger(__name__)

EVERY_SECONDS = 3.0
"""Between two updates of the page: a stage may advance a thousand times a second."""
_SECONDS_FOR_THE_LAST = 5.0


@contextlib.contextmanager
def shown(stage: str) -> Iterator[None]:
    """Show the progress of a stage in this block. Another thread talks to the server: training does not wait for it."""
    page = _Page(f"progress-{stage}")
    sender = threading.Thread(target=contextvars.copy_context().run, args=(page.send_until_closed,), daemon=True)
    sender.start()
    try:
        with progress.listening(page.note):
            yield
    finally:
        page.close()
        sender.join(_SECONDS_FOR_THE_LAST)


def in_words(update: Update) -> str:
    """Example: "rloo 3 of 12: success 43%, kl 0.051, 1 min 20 s left" """
    words = [update.note] if update.note else []
    if update.done < update.total:
        words.append(f"{clock(update.seconds_left)} left")
    return f"{update.what} {update.done} of {update.total}" + (f": {', '.join(words)}" if words else "")


class _Page:
    """The artifact of a stage; made when the stage first advances."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._newest: Update | None = None
        self._shown: Update | None = None
        self._artifact: UUID | None = None
        self._closed = threading.Event()

    def note(self, update: Update) -> None:
        self._newest = update

    def close(self) -> None:
        self._closed.set()

    def send_until_closed(self) -> None:
        try:
            while not self._closed.wait(EVERY_SECONDS):
                self._send()
            self._send()
        except Exception as error:  # noqa: BLE001
            logger.info("Prefect's page does not show the progress any more: %s", error)

    def _send(self) -> None:
        update = self._newest
        if update is None or update is self._shown:
            return
        percent = 100 * update.done / max(update.total, 1)
        if self._artifact is None:
            self._artifact = cast(UUID, create_progress_artifact(percent, key=self._key, description=in_words(update)))
        else:
            update_progress_artifact(self._artifact, percent, description=in_words(update))
        self._shown = update
