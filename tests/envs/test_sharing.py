"""Work of one thread is done once, by whoever is idle, and never waits for a place in the pool."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

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
    both_here, took_part = threading.Barrier(2), set()

    def work(_: int) -> None:
        both_here.wait(timeout=30)
        took_part.add(threading.get_ident())

    with ThreadPoolExecutor(1) as threads:
        share(threads, work, 2)
    assert len(took_part) == 2


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


def test_nobody_works_any_more_once_it_has_raised_and_the_rest_is_left_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    caller, both_began, awaited = threading.get_ident(), threading.Barrier(2), threading.Event()
    done: list[int] = []
    exception = Future.exception

    def told(helper: Future[Any], timeout: float | None = None) -> BaseException | None:
        awaited.set()
        return exception(helper, timeout)

    def work(number: int) -> None:
        if number < 2:
            both_began.wait(timeout=30)
        if threading.get_ident() == caller:
            raise ValueError("of the caller")
        awaited.wait(timeout=30)
        done.append(number)

    monkeypatch.setattr(Future, "exception", told)
    with ThreadPoolExecutor(1) as threads:
        with pytest.raises(ValueError, match="of the caller"):
            share(threads, work, 3)
        assert len(done) == 1


def test_a_helpers_error_is_the_callers() -> None:
    caller, begun = threading.get_ident(), threading.Barrier(2)

    def work(_: int) -> None:
        begun.wait(timeout=30)
        if threading.get_ident() != caller:
            raise ValueError("of the helper")

    with ThreadPoolExecutor(1) as threads, pytest.raises(ValueError, match="of the helper"):
        share(threads, work, 2)
