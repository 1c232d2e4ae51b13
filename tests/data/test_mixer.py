from __future__ import annotations

import contextlib
from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift.data.mixer import Mixer, _Schedule
from nightshift.errors import DataError


class Numbers:
    """A source that says who it is."""

    def __init__(self, value: int, **more: Any) -> None:
        self._value = value
        self._more = more

    def sample(self, count: int, /) -> dict[str, Any]:
        return {"x": np.full(count, self._value), "obs": {"y": np.full((count, 2), self._value)}, **self._more}


def two(online: float, **demos: Any) -> Mixer:
    return Mixer({"online": Numbers(0), "demos": Numbers(1, **demos)}, {"online": online, "demos": 1 - online})


def test_half_of_256_is_128_in_every_batch() -> None:
    mixer = two(0.5)
    for _ in range(3):
        batch = mixer.sample(256, num_batches=20)
        assert batch["source"].shape == (20 * 256,)
        assert (batch["source"].reshape(20, 256).sum(axis=1) == 128).all()


def test_rows_carry_the_source_they_come_from() -> None:
    batch = two(0.3).sample(10, num_batches=2)
    assert np.array_equal(batch["x"], batch["source"])
    assert np.array_equal(batch["obs"]["y"], np.stack([batch["source"]] * 2, axis=1))
    assert sorted(np.bincount(batch["source"])) == [6, 14]


@given(
    share=st.fractions(0, 1, max_denominator=1000),
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=8),
)
def test_every_sequence_of_batches_of_two_sources_is_within_one_of_its_share(
    share: Fraction, sizes: list[tuple[int, int]]
) -> None:
    mixer = two(float(share))
    edges, counts = [0], [0]
    for size, num_batches in sizes:
        for part in mixer.sample(size, num_batches=num_batches)["source"].reshape(num_batches, size):
            edges.append(edges[-1] + size)
            counts.append(counts[-1] + int((part == 0).sum()))
    for begin, end in combinations(range(len(edges)), 2):
        assert abs(counts[end] - counts[begin] - share * (edges[end] - edges[begin])) <= 1


@given(
    weights=st.lists(st.integers(0, 20), min_size=3, max_size=6).filter(any),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=10),
)
def test_more_sources_are_within_one_of_their_share_of_all_so_far(weights: list[int], sizes: list[int]) -> None:
    shares = [Fraction(weight, sum(weights)) for weight in weights]
    names = [f"s{i}" for i in range(len(weights))]
    mixer = Mixer({n: Numbers(i) for i, n in enumerate(names)}, dict(zip(names, map(float, shares), strict=True)))
    counts, total = np.zeros(len(weights), np.int64), 0
    for size in sizes:
        counts += np.bincount(mixer.sample(size)["source"], minlength=len(weights))
        total += size
        assert counts.sum() == total
        for count, share in zip(counts, shares, strict=True):
            assert abs(int(count) - share * total) < 1


def test_nothing_drifts_over_many_samples() -> None:
    mixer = two(0.1)
    for _ in range(300):
        assert (mixer.sample(10, num_batches=10)["source"].reshape(10, 10) == 0).sum(axis=1).tolist() == [1] * 10


@given(sizes=st.lists(st.integers(1, 9), min_size=2, max_size=8), cut=st.integers(0, 7))
def test_a_resumed_mixer_continues_the_schedule(sizes: list[int], cut: int) -> None:
    whole, before, after = two(0.37), two(0.37), two(0.37)
    expected = [whole.sample(size)["source"].tolist() for size in sizes]
    found = [before.sample(size)["source"].tolist() for size in sizes[:cut]]
    after.load_state_dict(before.state_dict())
    found += [after.sample(size)["source"].tolist() for size in sizes[cut:]]
    assert found == expected


class Failing(Numbers):
    """A source that has nothing yet."""

    error: Exception | None = DataError("there is nothing to sample")

    def sample(self, count: int, /) -> dict[str, Any]:
        if self.error:
            raise self.error
        return super().sample(count)


class Counting(Numbers):
    """A source that counts what was sampled for good."""

    counted = 0

    @contextlib.contextmanager
    def sampling(self, count: int, /) -> Iterator[dict[str, Any]]:
        yield self.sample(count)
        self.counted += count


@pytest.mark.parametrize("error", [DataError("there is nothing to sample"), TimeoutError("too few episodes arrived")])
def test_a_batch_that_never_came_is_not_counted_by_mixer_or_sources(error: Exception) -> None:
    online, demos = Counting(0), Failing(1)
    demos.error = error
    mixer = Mixer({"online": online, "demos": demos}, {"online": 0.5, "demos": 0.5})
    with pytest.raises(type(error), match=str(error)):
        mixer.sample(7)
    assert (online.counted, mixer.state_dict()["position"]) == (0, 0)
    demos.error = None
    assert np.bincount(mixer.sample(8)["source"]).tolist() == [4, 4]
    assert online.counted == 4


def test_an_empty_source_is_named() -> None:
    mixer = Mixer({"online": Numbers(0), "demos": Failing(1)}, {"online": 0.5, "demos": 0.5})
    with pytest.raises(DataError, match="the source demos: there is nothing to sample"):
        mixer.sample(8)


def test_a_changed_ratio_restarts_the_order() -> None:
    before, after, fresh = two(0.3), two(0.6), two(0.6)
    before.sample(7)
    after.sample(3)
    after.load_state_dict(before.state_dict())
    assert after.sample(9)["source"].tolist() == fresh.sample(9)["source"].tolist()


@pytest.mark.parametrize(
    "change",
    [
        {"sources": ["online", "rehearsal"]},
        {"sources": ["demos", "online"]},
        {"sources": ["online"]},
        {"position": 10},
        {"position": -1},
        {"position": 1.5},
        {"position": float("nan")},
        {"position": True},
        {"position": None},
    ],
)
def test_a_state_that_does_not_fit_is_refused(change: dict[str, Any]) -> None:
    mixer = two(0.3)
    mixer.sample(5)
    with pytest.raises(DataError, match="state"):
        mixer.load_state_dict({**mixer.state_dict(), **change})
    with pytest.raises(DataError, match="state"):
        mixer.load_state_dict({})
    assert mixer.state_dict()["position"] == 5


def test_the_order_is_computed_once_whatever_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dealing costs an index lookup per sample, not a decision."""
    decisions = []
    decide = _Schedule._next

    def record(schedule: _Schedule) -> int:
        decisions.append(schedule)
        return decide(schedule)

    monkeypatch.setattr(_Schedule, "_next", record)
    mixer = two(0.37)
    for _ in range(20):
        mixer.sample(256, num_batches=20)
    assert len(decisions) == 100


def test_shares_without_a_small_common_denominator_are_rounded_to_a_millionth() -> None:
    shares = [0.123457, 0.234561, 0.111119, 0.530863]
    names = [f"s{i}" for i in range(4)]
    mixer = Mixer({n: Numbers(i) for i, n in enumerate(names)}, dict(zip(names, shares, strict=True)))
    found = [float(Fraction(share)) for share in mixer.state_dict()["shares"]]
    assert sum(found) == 1
    np.testing.assert_allclose(found, shares, atol=1e-6)


def test_a_source_with_other_fields_or_fewer_rows_is_reported() -> None:
    with pytest.raises(DataError, match="online and demos has z"):
        two(0.5, z=np.zeros(4)).sample(8)
    with pytest.raises(DataError, match=r"obs\.y of the source demos is float64"):
        two(0.5, obs={"y": np.zeros((4, 2))}).sample(8)
    with pytest.raises(DataError, match="demos returned 3 samples of x, not 4"):
        two(0.5, x=np.zeros(3, np.int64)).sample(8)


@pytest.mark.parametrize("ratio", [{"a": 1.0}, {"a": 0.5, "b": 0.6}, {"a": 1.5, "b": -0.5}, {}])
def test_an_invalid_ratio_is_rejected(ratio: dict[str, float]) -> None:
    with pytest.raises(DataError):
        Mixer({"a": Numbers(0), "b": Numbers(1)}, ratio)


@pytest.mark.parametrize("share", [float("nan"), float("inf"), float("-inf")])
def test_a_share_that_is_not_finite_is_rejected(share: float) -> None:
    with pytest.raises(DataError, match="must consist of shares"):
        Mixer({"online": Numbers(0), "demos": Numbers(1)}, {"online": share, "demos": 1.0})
