"""Items that a thread makes while the caller works on earlier ones."""

from __future__ import annotations

import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")


def ahead(items: Generator[Item, None, None], count: int) -> Generator[Item, None, None]:
    """The same items, of which the next `count` are made while the present `count` are in use.

    Example: `for image in ahead(drawn(states), 1): save(image)` draws the next image while one is saved.
    """
    unwanted = threading.Event()

    def make() -> list[Item]:
        made: list[Item] = []
        while len(made) < count and not unwanted.is_set():
            try:
                made.append(next(items))
            except StopIteration:
                break
        return made

    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(make)
        try:
            while made := coming.result():
                coming = thread.submit(make)
                yield from made
        finally:
            unwanted.set()
            thread.submit(items.close).result()
