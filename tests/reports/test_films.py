"""Which episodes are filmed, and that a film is one that browsers play."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from nightshift.reports import films

CELLS = [(task, state) for task in ("lift", "stack") for state in range(4)]


def outcomes(**failed: set[int]) -> dict[tuple[str, int], bool]:
    return {(task, state): state not in failed.get(task, set()) for task, state in CELLS}


def test_films_show_the_first_state_then_one_won_then_one_failed_and_tasks_take_turns() -> None:
    clone, trained = outcomes(lift={1, 3}, stack={2}), outcomes(lift={3}, stack=set())
    assert films.choose(clone, trained, 10) == [("lift", 0), ("lift", 1), ("stack", 2), ("lift", 3), ("stack", 0)]
    assert films.choose(clone, trained, 4) == [("lift", 0), ("lift", 1), ("stack", 2), ("lift", 3)]
    assert films.choose(clone, trained, 1) == [("lift", 0)]
    assert films.choose(clone, trained, 0) == []
    assert films.choose({}, {}, 2) == []


@pytest.mark.parametrize(
    ("trained", "second"),
    [
        (outcomes(lift={3}), ("lift", 3)),
        (outcomes(lift={0, 1, 3}, stack={0, 2}), ("lift", 2)),
        (outcomes(lift={0, 3}), ("lift", 1)),
        (outcomes(), ("lift", 1)),
    ],
    ids=["a failure", "a success", "a success where the clone fails says more", "it failed nothing"],
)
def test_two_films_show_the_first_state_and_a_success_and_a_failure_of_the_policy_if_it_has_both(
    trained: dict[tuple[str, int], bool], second: tuple[str, int]
) -> None:
    assert films.choose(outcomes(lift={1, 3}, stack={2}), trained, 2) == [("lift", 0), second]


def test_a_failure_that_the_clone_solved_says_more_than_another() -> None:
    assert films.choose(outcomes(lift={1}), outcomes(lift={1, 2}), 2) == [("lift", 0), ("lift", 2)]


def test_a_state_whose_simulator_failed_is_not_filmed() -> None:
    clone = outcomes()
    del clone["lift", 0]
    assert films.choose(clone, outcomes(), 2) == [("lift", 1), ("stack", 0)]


@pytest.mark.parametrize(("rate", "kept"), [(20, "20"), (12.5, "25/2")])
def test_a_film_is_h264_as_fast_as_the_robot_moved_with_a_strip_of_stills(
    tmp_path: Path, rate: float, kept: str
) -> None:
    frames = np.random.default_rng(0).integers(0, 255, (9, 33, 48, 3), dtype=np.uint8)
    films.write(tmp_path / "film.mp4", frames, rate=rate)
    with av.open(tmp_path / "film.mp4") as video:
        stream = video.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert (str(stream.average_rate), stream.width, stream.height) == (kept, 48, 32)
        assert sum(1 for _ in video.decode(video=0)) == 9
    with Image.open(tmp_path / "film.jpg") as strip:
        assert strip.size == (6 * round(48 * 128 / 33), 128)


def test_what_the_policy_saw_is_beside_the_scene_until_its_next_decision() -> None:
    frames = np.zeros((6, 8, 8, 3), np.uint8)  # before steps 0 to 4, and after the last
    seen = np.full((3, 4, 4, 3), [[[[10]]], [[[20]]], [[[30]]]], np.uint8)  # two decisions of three steps, and the end
    film = films.with_views(frames, [seen, seen + 5], chunk=3)
    assert film.shape == (6, 8, 24, 3)
    assert film[:, 0, 8, 0].tolist() == [10, 10, 10, 20, 20, 30]
    assert film[:, 0, 16, 0].tolist() == [15, 15, 15, 25, 25, 35]


def test_the_film_of_a_policy_that_sees_no_images_is_the_scene() -> None:
    frames = np.random.default_rng(0).integers(0, 255, (4, 8, 8, 3), dtype=np.uint8)
    assert np.array_equal(films.with_views(frames, [], chunk=2), frames)
