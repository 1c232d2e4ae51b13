"""Items that a thread makes ahead of their use."""

from __future__ import annotations

import threading
from collections.abc import Generator

import pytest

from nightshift.rollouts.ahead import ahead

PATIENCE = 60.0


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_all_items_come_in_order(count: int) -> None:
    assert list(ahead((number for number in range(5)), count)) == [0, 1, 2, 3, 4]


def test_the_next_items_are_made_while_some_are_in_use() -> None:
    begun = threading.Event()

    def items() -> Generator[int, None, None]:
        yield from (0, 1)
        begun.set()
        yield 2

    made = ahead(items(), 2)
    assert next(made) == 0
    assert begun.wait(PATIENCE), "nothing was made while the first item was in use"
    assert list(made) == [1, 2]


def test_no_more_are_made_than_asked_for() -> None:
    made: list[int] = []

    def items() -> Generator[int, None, None]:
        for number in range(100):
            made.append(number)
            yield number

    using = ahead(items(), 2)
    assert [next(using), next(using)] == [0, 1]
    using.close()
    assert made[-1] <= 3


def test_an_error_is_raised_where_the_item_would_come() -> None:
    def items() -> Generator[int, None, None]:
        yield 0
        raise LookupError("no mesh")

    made = ahead(items(), 1)
    assert next(made) == 0
    with pytest.raises(LookupError, match="no mesh"):
        next(made)


def test_items_that_are_no_longer_wanted_are_closed_where_they_were_made() -> None:
    threads: list[int] = []

    def items() -> Generator[int, None, None]:
        threads.append(threading.get_ident())
        try:
            yield from range(100)
        finally:
            threads.append(threading.get_ident())

    made = ahead(items(), 1)
    next(made)
    made.close()
    assert len(threads) == 2
    assert threads[0] == threads[1] != threading.get_ident()
