import threading
import warnings
from collections.abc import Mapping

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nightshift.data.limiter import Band, Limiter
from nightshift.errors import DataError


def test_seven_inserts_pass_and_then_one_for_every_two_samples() -> None:
    """What dm-reverb 0.14.0 does at 2 samples per insert, 5 items at least and an error of 4."""
    limiter = Limiter(Band.ratio(2, min_size=5, error=4))
    inserted = 0
    while limiter.can_insert():
        limiter.await_insert()
        inserted += 1
    assert inserted == 7
    for _ in range(20):
        assert not limiter.can_insert()
        limiter.await_sample()
        assert not limiter.can_insert()
        limiter.await_sample()
        limiter.await_insert(timeout=0)


def test_nobody_samples_before_enough_is_there() -> None:
    limiter = Limiter(Band.ratio(2, min_size=5, error=4))
    for _ in range(4):
        limiter.await_insert()
        assert not limiter.can_sample()
    limiter.await_insert()
    assert [limiter.can_sample(n) for n in (1, 4, 5)] == [True, True, False]


def test_deletes_make_items_fewer_and_leave_the_difference_alone() -> None:
    limiter = Limiter(Band.ratio(1, min_size=3, error=2))
    limiter.await_insert(3)
    assert limiter.can_sample()
    limiter.delete()
    assert not limiter.can_sample()
    assert limiter.metrics()["limiter/difference"] == 3
    limiter.await_insert(timeout=0)  # there is room below min_size, whatever the difference
    assert limiter.can_sample()
    with pytest.raises(ValueError, match="4 items cannot go where 3 are"):
        limiter.delete(4)


def test_a_queue_gives_every_item_once() -> None:
    limiter = Limiter(Band.queue(3))
    limiter.await_insert(3)
    assert not limiter.can_insert()
    limiter.await_sample(3)
    assert not limiter.can_sample()
    assert limiter.can_insert(3)


@pytest.mark.parametrize(
    ("ratio", "size", "error", "reason"),
    [
        (0, 5, 4.0, "samples_per_insert is 0"),
        (-1, 5, 4.0, "samples_per_insert is -1"),
        (1, 0, 4.0, "min_size is 0"),
        (2, 5, 1.9, "must be at least 4"),
        (0.5, 5, 0.9, "must be at least 2"),
        (1, 5, (6.0, 10.0), "begins at 6, above the 5"),
    ],
)
def test_a_band_in_which_nobody_could_move_is_refused(
    ratio: float, size: int, error: float | tuple[float, float], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        Band.ratio(ratio, size, error)


def test_a_band_that_stops_inserts_early_is_allowed_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="ends at 4, below the 5"):
        Band.ratio(1, 5, (0.0, 4.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Band.ratio(1, 5, (0.0, 5.0))


def test_who_waits_too_long_is_told_where_things_stand() -> None:
    limiter = Limiter(Band.ratio(2, min_size=5, error=4))
    with pytest.raises(TimeoutError, match=r"no room to sample 1 within 0 s: 0 inserts, 0 samples, 0 deletes; d is 0"):
        limiter.await_sample(timeout=0)
    limiter.await_insert(7)
    with pytest.raises(TimeoutError, match=r"no room to insert 1 .* d is 14 in \[6, 14\]"):
        limiter.await_insert(timeout=0.01)
    assert limiter.state() == {"inserts": 7, "samples": 0, "deletes": 0}
    with pytest.raises(ValueError, match="at least 1"):
        limiter.await_sample(0)


def test_counters_come_back_from_a_checkpoint_and_the_band_stays_as_configured() -> None:
    """A checkpoint that brought its old limits back would block forever."""
    before = Limiter(Band.ratio(1, min_size=2, error=2))
    before.await_insert(4)
    before.await_sample(3)
    after = Limiter(Band.ratio(8, min_size=1, error=100))
    after.restore(before.state())
    assert after.state() == before.state()
    assert after.band == Band.ratio(8, min_size=1, error=100)
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
    ],
)
def test_a_damaged_checkpoint_is_refused(state: Mapping[str, int]) -> None:
    with pytest.raises(DataError, match="is not the state of a limiter"):
        Limiter(Band.queue(1)).restore(state)


BANDS = st.builds(
    lambda ratio, size, below, above: (ratio, size, (ratio * size - below, ratio * size + above)),
    st.sampled_from([0.25, 0.5, 1.0, 2.0, 5.0, 20.0]),
    st.integers(1, 8),
    st.floats(0, 50),
    st.floats(0, 50),
)
MOVES = st.lists(st.tuples(st.sampled_from(["insert", "sample", "delete"]), st.integers(1, 4)), max_size=80)


@settings(deadline=None)
@given(band=BANDS, moves=MOVES)
def test_whatever_is_tried_the_band_holds_and_somebody_can_move(
    band: tuple[float, int, tuple[float, float]], moves: list[tuple[str, int]]
) -> None:
    ratio, size, (low, high) = band
    assume(high - low >= 2 * max(1, ratio))
    limiter = Limiter(Band.ratio(ratio, size, (low, high)))
    inserts = samples = deletes = 0
    for move, count in moves:
        if move == "insert" and limiter.can_insert(count):
            limiter.await_insert(count, timeout=0)
            inserts += count
            assert inserts - deletes <= size or inserts * ratio - samples <= high
        elif move == "sample" and limiter.can_sample(count):
            limiter.await_sample(count, timeout=0)
            samples += count
            assert inserts - deletes >= size
            assert inserts * ratio - samples >= low
        elif move == "delete" and count <= inserts - deletes:
            limiter.delete(count)
            deletes += count
        assert limiter.can_insert() or limiter.can_sample()
    assert limiter.state() == {"inserts": inserts, "samples": samples, "deletes": deletes}


@pytest.mark.parametrize("ratio", [0.5, 3.0])
def test_threads_that_insert_and_sample_as_they_like_keep_the_ratio(ratio: float) -> None:
    limiter = Limiter(Band.ratio(ratio, min_size=4, error=6))
    stop = threading.Event()
    differences: list[float] = []

    def work(act: str) -> None:
        while not stop.is_set():
            try:
                (limiter.await_insert if act == "insert" else limiter.await_sample)(timeout=0.2)
            except TimeoutError:
                continue
            counts = limiter.state()
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
