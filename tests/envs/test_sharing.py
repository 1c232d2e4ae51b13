"""Work of one thread is done once, by whoever is idle, and never waits for a place in the pool."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from nightshift.envs.sharing import share


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("count", [0, 1, 2, 9])
def test_all_of_it_is_done_once(size: int, count: int) -> None:
    done: list[int] = []
    with ThreadPoolExecutor(size) as threads:
        share(threads, done.append, count)
    assert sorted(done) == list(range(count))


def test_idle_threads_take_part() -> None:
    both_here = threading.Barrier(2)
    with ThreadPoolExecutor(1) as threads:
        share(threads, lambda _: void(both_here.wait(timeout=30)), 2)


def test_threads_that_all_share_their_work_do_not_wait_for_one_another() -> None:
    done: list[int] = []
    everybody_begins = threading.Barrier(2)

    def group() -> None:
        everybody_begins.wait(timeout=30)
        share(threads, done.append, 8)

    with ThreadPoolExecutor(2) as threads:
        for group_done in [threads.submit(group) for _ in range(2)]:
            group_done.result(timeout=30)
    assert len(done) == 16


def test_nobody_works_any_more_once_it_has_raised_and_the_rest_is_left_undone() -> None:
    caller, begun, raised = threading.get_ident(), threading.Barrier(2), threading.Event()
    done: list[int] = []

    def work(number: int) -> None:
        if number < 2:
            begun.wait(timeout=30)
        if threading.get_ident() == caller:
            raised.set()
            raise ValueError("of the caller")
        raised.wait(timeout=30)
        time.sleep(0.05)  # the caller is in its `finally` by then
        done.append(number)

    with ThreadPoolExecutor(1) as threads, pytest.raises(ValueError, match="of the caller"):
        share(threads, work, 2)
    assert len(done) == 1


def test_a_helpers_error_is_the_callers() -> None:
    caller, begun = threading.get_ident(), threading.Barrier(2)

    def work(_: int) -> None:
        begun.wait(timeout=30)
        if threading.get_ident() != caller:
            raise ValueError("of the helper")

    with ThreadPoolExecutor(1) as threads, pytest.raises(ValueError, match="of the helper"):
        share(threads, work, 2)


def void(_: object) -> None:
    """For work that returns something."""
