"""Films of evaluation episodes: which init states are filmed, and how frames become an MP4 and a strip of stills."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from nightshift.project import packages
from nightshift.statistics.paired import Cell

ENCODER = "av"
"""The package that makes MP4s."""
_CODEC = "libx264"
_OPTIONS = {"crf": "24", "preset": "slow", "movflags": "+faststart"}
_STILLS = 6
_STILL_SIZE = 128


class Film(TypedDict):
    """One filmed episode. On a GPU it may end differently from the counted one, so it has its own outcome."""

    task: str
    init_state: int
    candidate: str
    success: bool
    length: int
    file: str
    """The MP4; the strip of stills has the same name with .jpg."""


def choose(baseline: Mapping[Cell, bool], policy: Mapping[Cell, bool], count: int) -> list[Cell]:
    """At most `count` init states. The first of the grid comes first: it is the same in every evaluation, so that the
    films of an earlier one, which the champion was in, stand beside these. Then those that show most: tasks take turns,
    each with a state that the policy won over the baseline, then one that it failed, then its first state. Two or more
    show a success and a failure of the policy, if it has both."""
    cells = sorted(baseline.keys() & policy.keys())
    tasks = list(dict.fromkeys(task for task, _ in cells))
    by_task = [_telling(baseline, policy, [cell for cell in cells if cell[0] == task]) for task in tasks]
    turns = [cell for turn in zip_longest(*by_task) for cell in turn if cell is not None]
    ordered = dict.fromkeys([*cells[:1], *turns])
    return _with_both_ends(list(islice(ordered, count)), [*turns, *cells], policy)


def _with_both_ends(chosen: list[Cell], others: Sequence[Cell], policy: Mapping[Cell, bool]) -> list[Cell]:
    """The last one is replaced if all of them ended the same way and another did not."""
    ends = {policy[cell] for cell in chosen}
    missing = [cell for cell in others if policy[cell] not in ends]
    return [*chosen[:-1], missing[0]] if len(chosen) > 1 and missing else chosen


def _telling(baseline: Mapping[Cell, bool], policy: Mapping[Cell, bool], cells: Sequence[Cell]) -> list[Cell]:
    won = [cell for cell in cells if policy[cell] and not baseline[cell]]
    lost = [cell for cell in cells if baseline[cell] and not policy[cell]]
    failed = lost or [cell for cell in cells if not policy[cell]]
    return list(dict.fromkeys([*won[:1], *failed[:1], *cells[:1]]))


def with_views(frames: NDArray[np.uint8], views: Sequence[NDArray[np.uint8]], chunk: int) -> NDArray[np.uint8]:
    """Frames [T, H, W, 3], one per control step, with what the policy saw beside them, at the same height.

    Each of `views` [D, h, w, 3] is a camera: an image per decision, shown for the `chunk` steps that follow it, and one
    of the end.
    """
    height, decisions = frames.shape[1], np.arange(len(frames)) // chunk
    decisions[-1] = -1
    scaled = [np.stack([_scaled(image, height) for image in images]) for images in views]
    return np.concatenate([frames, *(images[decisions] for images in scaled)], axis=2)


def _scaled(image: NDArray[np.uint8], height: int) -> NDArray[np.uint8]:
    width = round(image.shape[1] * height / image.shape[0])
    return np.asarray(Image.fromarray(image).resize((width, height)))


def write(path: Path, frames: NDArray[np.uint8], rate: float) -> None:
    """An MP4 that every browser plays (H.264, 4:2:0) at `path`, and beside it a strip of stills as JPEG, for print.

    `rate`: frames per second. Without the package av, which a compute node may lack, the strip alone.
    """
    if packages.is_installed(ENCODER):
        _encode(path, frames, rate)
    _strip(frames).save(path.with_suffix(".jpg"), quality=85)


def _encode(path: Path, frames: NDArray[np.uint8], rate: float) -> None:
    import av  # only where films are made

    even = frames[:, : frames.shape[1] // 2 * 2, : frames.shape[2] // 2 * 2]
    with av.open(path, "w") as video:
        stream: Any = video.add_stream(_CODEC, rate=Fraction(rate).limit_denominator(1000), options=_OPTIONS)
        stream.height, stream.width = even.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for frame in even:
            video.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        video.mux(stream.encode())


def _strip(frames: NDArray[np.uint8]) -> Image.Image:
    chosen = np.linspace(0, len(frames) - 1, _STILLS).round().astype(int)
    height = _STILL_SIZE
    width = round(frames.shape[2] * height / frames.shape[1])
    strip = Image.new("RGB", (_STILLS * width, height))
    for place, index in enumerate(chosen.tolist()):
        strip.paste(Image.fromarray(frames[index]).resize((width, height)), (place * width, 0))
    return strip
