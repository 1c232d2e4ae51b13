"""What comes next: tasks and init states take turns in a ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Ring(Generic[Item]):
    """A few things in a fixed order, round and round; a checkpoint holds the cursor.

    Example: Ring([7, 8, 9]).take(4) gives [7, 8, 9, 7], and then take(2) gives [8, 9].
    """

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = list(items)
        self.cursor = 0

    def __len__(self) -> int:
        return len(self._items)

    def take(self, count: int) -> list[Item]:
        chosen = [self._items[(self.cursor + offset) % len(self._items)] for offset in range(count)]
        self.cursor += count
        return chosen
