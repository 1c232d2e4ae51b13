import threading
import warnings
from collections.abc import Mapping

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nightshift.data.rate_limiter import RateLimiter, RateLimits
from nightshift.errors import DataError


def test_seven_inserts_pass_and_then_one_for_every_two_samples() -> None:
    """What dm-reverb 0.14.0 does at 2 samples per insert, 5 items at least and an error of 4."""
    limiter = RateLimiter(RateLimits.sample_to_insert_ratio(2, min_size_to_sample=5, error_buffer=4))
    inserted = 0
    while limiter.can_insert():
        limiter.wait_for_insert()
        inserted += 1
    assert inserted == 7
    for _ in range(20):
        assert not limiter.can_insert()
        limiter.wait_for_sample()
        assert not limiter.can_insert()
        limiter.wait_for_sample()
        limiter.wait_for_insert(timeout=0)


def test_sampling_starts_at_min_size_to_sample() -> None:
    limiter = RateLimiter(RateLimits.sample_to_insert_ratio(2, min_size_to_sample=5, error_buffer=4))
    for _ in range(4):
        limiter.wait_for_insert()
        assert not limiter.can_sample()
    limiter.wait_for_insert()
    assert [limiter.can_sample(n) for n in (1, 4, 5)] == [True, True, False]


def test_deletes_reduce_the_items_and_do_not_change_the_diff() -> None:
    limiter = RateLimiter(RateLimits.sample_to_insert_ratio(1, min_size_to_sample=3, error_buffer=2))
    limiter.wait_for_insert(3)
    assert limiter.can_sample()
    limiter.delete()
    assert not limiter.can_sample()
    assert limiter.metrics()["rate_limiter/difference"] == 3
    limiter.wait_for_insert(timeout=0)  # there is room below min_size_to_sample, whatever the difference
    assert limiter.can_sample()
    with pytest.raises(ValueError, match="4 items cannot be deleted: there are 3"):
        limiter.delete(4)


def test_a_queue_samples_every_item_once() -> None:
    limiter = RateLimiter(RateLimits.queue(3))
    limiter.wait_for_insert(3)
    assert not limiter.can_insert()
    limiter.wait_for_sample(3)
    assert not limiter.can_sample()
    assert limiter.can_insert(3)


@pytest.mark.parametrize(
    ("ratio", "size", "error", "reason"),
    [
        (0, 5, 4.0, "samples_per_insert is 0"),
        (-1, 5, 4.0, "samples_per_insert is -1"),
        (1, 0, 4.0, "min_size_to_sample is 0"),
        (2, 5, 1.9, "must be at least 4"),
        (0.5, 5, 0.9, "must be at least 2"),
        (1, 5, (6.0, 10.0), "min_diff is 6, above the 5"),
        (1, 5, (10.0, 2.0), "min_diff is 10.0 and max_diff is 2.0"),
        (1, 5, float("nan"), "min_diff is nan"),
        (float("nan"), 5, 4.0, "samples_per_insert is nan"),
        (float("inf"), 5, 4.0, "samples_per_insert is inf"),
        (1, float("nan"), 4.0, "min_size_to_sample is nan"),
    ],
)
def test_limits_that_would_deadlock_are_rejected(
    ratio: float, size: int, error: float | tuple[float, float], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        RateLimits.sample_to_insert_ratio(ratio, size, error)


def test_limits_that_block_inserts_early_are_allowed_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="max_diff is 4, below the 5"):
        RateLimits.sample_to_insert_ratio(1, 5, (0.0, 4.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RateLimits.sample_to_insert_ratio(1, 5, (0.0, 5.0))


def test_a_timeout_reports_the_counters() -> None:
    limiter = RateLimiter(RateLimits.sample_to_insert_ratio(2, min_size_to_sample=5, error_buffer=4))
    with pytest.raises(TimeoutError, match=r"could not sample 1 within 0 s: 0 inserts, 0 samples, 0 deletes; d is 0"):
        limiter.wait_for_sample(timeout=0)
    limiter.wait_for_insert(7)
    with pytest.raises(TimeoutError, match=r"could not insert 1 .* d is 14, the limits are \[6, 14\]"):
        limiter.wait_for_insert(timeout=0.01)
    assert limiter.state_dict() == {"inserts": 7, "samples": 0, "deletes": 0}
    with pytest.raises(ValueError, match="at least 1"):
        limiter.wait_for_sample(0)


def test_samples_whose_batch_never_came_are_not_counted() -> None:
    limiter = RateLimiter(RateLimits.sample_to_insert_ratio(1, min_size_to_sample=1, error_buffer=5))
    limiter.wait_for_insert(4)
    with pytest.raises(DataError), limiter.sampling(3):
        assert limiter.state_dict()["samples"] == 3  # nobody else may take them meanwhile
        raise DataError("the file is damaged")
    assert limiter.state_dict()["samples"] == 0
    with limiter.sampling(2):
        pass
    assert limiter.state_dict()["samples"] == 2


def test_a_checkpoint_restores_the_counters_and_not_the_limits() -> None:
    """A checkpoint that brought its old limits back would block forever."""
    before = RateLimiter(RateLimits.sample_to_insert_ratio(1, min_size_to_sample=2, error_buffer=2))
    before.wait_for_insert(4)
    before.wait_for_sample(3)
    after = RateLimiter(RateLimits.sample_to_insert_ratio(8, min_size_to_sample=1, error_buffer=100))
    after.load_state_dict(before.state_dict())
    assert after.state_dict() == before.state_dict()
    assert after.limits == RateLimits.sample_to_insert_ratio(8, min_size_to_sample=1, error_buffer=100)
    assert after.can_insert(5)
    assert not before.can_insert(5)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"inserts": 1, "samples": 0},
        {"inserts": -1, "samples": 0, "deletes": 0},
        {"inserts": 1, "samples": 0, "deletes": 2},
        {"inserts": 1.5, "samples": 0, "deletes": 0},
        {"inserts": float("nan"), "samples": 0, "deletes": 0},
        {"inserts": 0, "samples": 4, "deletes": 0},
    ],
)
def test_a_damaged_checkpoint_is_refused(state: Mapping[str, int]) -> None:
    with pytest.raises(DataError, match="is not the state of a rate limiter"):
        RateLimiter(RateLimits.queue(1)).load_state_dict(state)


BANDS = st.builds(
    lambda ratio, size, below, above: (ratio, size, (ratio * size - below, ratio * size + above)),
    st.sampled_from([0.25, 0.5, 1.0, 2.0, 5.0, 20.0]),
    st.integers(1, 8),
    st.floats(0, 50),
    st.floats(0, 50),
)
MOVES = st.lists(st.tuples(st.sampled_from(["insert", "sample", "delete"]), st.integers(1, 4)), max_size=80)


@settings(deadline=None)
@given(limits=BANDS, moves=MOVES)
def test_the_limits_hold_and_never_deadlock(
    limits: tuple[float, int, tuple[float, float]], moves: list[tuple[str, int]]
) -> None:
    ratio, size, (low, high) = limits
    assume(high - low >= 2 * max(1, ratio))
    limiter = RateLimiter(RateLimits.sample_to_insert_ratio(ratio, size, (low, high)))
    inserts = samples = deletes = 0
    for move, count in moves:
        if move == "insert" and limiter.can_insert(count):
            limiter.wait_for_insert(count, timeout=0)
            inserts += count
            assert inserts - deletes <= size or inserts * ratio - samples <= high
        elif move == "sample" and limiter.can_sample(count):
            limiter.wait_for_sample(count, timeout=0)
            samples += count
            assert inserts - deletes >= size
            assert inserts * ratio - samples >= low
        elif move == "delete" and count <= inserts - deletes:
            limiter.delete(count)
            deletes += count
        assert limiter.can_insert() or limiter.can_sample()
    assert limiter.state_dict() == {"inserts": inserts, "samples": samples, "deletes": deletes}


@pytest.mark.parametrize("ratio", [0.5, 3.0])
def test_concurrent_threads_keep_the_ratio(ratio: float) -> None:
    limiter = RateLimiter(RateLimits.sample_to_insert_ratio(ratio, min_size_to_sample=4, error_buffer=6))
    stop = threading.Event()
    differences: list[float] = []

    def work(act: str) -> None:
        while not stop.is_set():
            try:
                (limiter.wait_for_insert if act == "insert" else limiter.wait_for_sample)(timeout=0.2)
            except TimeoutError:
                continue
            counts = limiter.state_dict()
            if counts["inserts"] > 4:
                differences.append(counts["inserts"] * ratio - counts["samples"])
            if counts["inserts"] >= 500:
                stop.set()

    threads = [threading.Thread(target=work, args=(act,)) for act in ("insert", "insert", "sample", "sample")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert stop.is_set()
    assert 4 * ratio - 6 <= min(differences)
    assert max(differences) <= 4 * ratio + 6
