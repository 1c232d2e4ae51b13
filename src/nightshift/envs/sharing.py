"""Work of one thread that idle threads of a pool share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor


def share(threads: Executor, work: Callable[[int], None], count: int) -> None:
    """Do `work` of 0 to count - 1, each once: in this thread and in those of `threads` that are idle.

    This thread may belong to the pool itself: it takes what nobody has begun, so it never waits for a place in it.
    """
    to_do = deque(range(count))

    def take_part() -> None:
        while to_do:
            try:
                number = to_do.popleft()
            except IndexError:  # another thread took the last one
                return
            work(number)

    helpers = [threads.submit(take_part) for _ in range(count - 1)]
    try:
        take_part()
    finally:
        to_do.clear()  # after an error nobody needs the rest
        begun = [helper for helper in helpers if not helper.cancel()]
        errors = [helper.exception() for helper in begun]  # waits for them: they write where the caller reads
    for error in errors:
        if error is not None:
            raise error
