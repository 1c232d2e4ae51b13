"""A cyclic order with a cursor, for tasks and init states that take turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

from nightshift.types import Task

Item = TypeVar("Item")


class Ring(Generic[Item]):
    """Items in a fixed cyclic order; a checkpoint holds the cursor.

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


def shuffled(task: Task, states: Sequence[int], *, seed: int, domain: int) -> list[int]:
    """The init states in a random order, another one for every task and `domain`."""
    order: list[int] = np.random.default_rng([seed, task.index, domain]).permutation(states).tolist()
    return order
