"""The pages that are connected. Each gets every notice, but of states and pictures only the newest.

A page acknowledges pictures, and the next ones wait for that: over a slow network the pictures become fewer, not older.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nightshift.teleop.mirror import Frame

UNSEEN_PER_VIEW = 2
"""Pictures of a view that may be on their way to a page."""
_NOTICES = 256
_HEADER = struct.Struct("<BxxxId")
"""Of a picture: the index of its view, the control step, the time of that step."""


class Page:
    """What is waiting to be sent to one page."""

    def __init__(self, number: int, views: Sequence[str]) -> None:
        self.number = number
        self._views = list(views)
        self._texts: deque[str] = deque(maxlen=_NOTICES)
        self._state: str | None = None
        self._frames: dict[str, Frame] = {}
        self._unseen = 0
        self._wake = asyncio.Event()

    def tell(self, text: str, *, is_state: bool = False) -> None:
        if is_state:
            self._state = text
        else:
            self._texts.append(text)
        self._wake.set()

    def show(self, frame: Frame) -> None:
        self._frames[frame.view] = frame
        self._wake.set()

    def seen(self) -> None:
        self._unseen = max(0, self._unseen - 1)
        self._wake.set()

    async def next(self) -> str | bytes:
        """The next thing to send: notices first, then the newest state, then pictures."""
        while True:
            if self._texts:
                return self._texts.popleft()
            if self._state is not None:
                text, self._state = self._state, None
                return text
            if self._frames and self._unseen < UNSEEN_PER_VIEW * len(self._views):
                view = next(iter(self._frames))
                self._unseen += 1
                return encode(self._frames.pop(view), self._views)
            self._wake.clear()
            await self._wake.wait()


class Hub:
    """A `Listener` for the threads of the simulator and the mirror; its pages belong to the server's thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pages: set[Page] = set()
        self._newest: dict[str, Frame] = {}
        self.on_failure: Callable[[BaseException], None] = lambda error: None

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def add(self, page: Page) -> None:
        self._pages.add(page)
        for frame in list(self._newest.values()):
            page.show(frame)

    def remove(self, page: Page) -> None:
        self._pages.discard(page)

    def find(self, number: int) -> Page | None:
        return next((page for page in self._pages if page.number == number), None)

    @property
    def count(self) -> int:
        return len(self._pages)

    def tell(self, message: Mapping[str, Any]) -> None:
        text, is_state = json.dumps(message), message["type"] == "state"
        self._to_all(lambda page: page.tell(text, is_state=is_state))

    def show(self, frame: Frame) -> None:
        self._newest[frame.view] = frame
        self._to_all(lambda page: page.show(frame))

    def fail(self, error: BaseException) -> None:
        self.on_failure(error)

    def _to_all(self, give: Callable[[Page], None]) -> None:
        """In the server's thread; nothing where the server is not up yet or is gone."""

        def give_all() -> None:
            for page in self._pages:
                give(page)

        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(give_all)


def encode(frame: Frame, views: Sequence[str]) -> bytes:
    return _HEADER.pack(views.index(frame.view), frame.step, frame.time) + frame.jpeg
