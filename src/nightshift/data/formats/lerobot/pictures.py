"""Pictures in and out: PNG exactly, MP4 as well as the codec can."""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from nightshift.errors import DataError

Frames = NDArray[np.uint8]  # [T, H, W, 3]

CODEC = "libx264"
PIXELS = "yuv420p"
_OPTIONS = {"crf": "18", "g": "2"}
"""Near lossless, and a key frame every other frame: training jumps about in films."""
_PNG_EFFORT = 1


def to_png(picture: NDArray[np.uint8]) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(picture).save(stream, "PNG", compress_level=_PNG_EFFORT)
    return stream.getvalue()


def from_file(content: bytes, where: str) -> NDArray[Any]:
    """[H, W, channels] of a PNG, a JPEG or any other picture, its values as they are in the file."""
    try:
        with Image.open(io.BytesIO(content)) as picture:
            if picture.mode == "P":
                raise ValueError("it has a palette")
            values = np.asarray(picture)
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{where} is not a readable picture: {error}") from None
    return values if values.ndim > 2 else values[..., None]  # noqa: PLR2004 - no axis for a single channel


def write_film(path: Path, frames: Frames, fps: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    _, height, width, _ = frames.shape
    with av.open(path, "w") as film:
        stream: Any = film.add_stream(CODEC, rate=fps, options=_OPTIONS)
        stream.width, stream.height, stream.pix_fmt = width, height, PIXELS
        for picture in frames:
            film.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        film.mux(stream.encode())


def read_film(path: Path, seconds: Sequence[float], fps: float, where: str) -> Frames:
    """The frames at these times, which ascend; a film that has none within half a frame of one is refused."""
    try:
        found = _decode(path, seconds, fps)
    except FileNotFoundError:
        raise DataError(f"{where}: there is no film {path}") from None
    except (av.FFmpegError, ValueError, IndexError) as error:
        raise DataError(f"{where}: the film {path} is not readable: {error}") from None
    missing = [second for second, picture in zip(seconds, found, strict=True) if picture is None]
    if missing:
        raise DataError(f"{where}: the film {path} has no frame at {missing[0]:.3f} s ({len(missing)} are missing)")
    return np.stack([picture for picture in found if picture is not None])


def _decode(path: Path, seconds: Sequence[float], fps: float) -> list[NDArray[np.uint8] | None]:
    found: list[NDArray[np.uint8] | None] = [None] * len(seconds)
    nearest = [0.5 / fps] * len(seconds)
    with av.open(path) as film:
        stream = film.streams.video[0]
        base = stream.time_base or Fraction(1, 1)
        film.seek(max(0, int(seconds[0] / base)), stream=stream)
        for frame in film.decode(stream):
            now = float((frame.pts or 0) * base)
            place = int(np.argmin(np.abs(np.asarray(seconds) - now)))
            if abs(seconds[place] - now) < nearest[place]:
                nearest[place] = abs(seconds[place] - now)
                found[place] = np.asarray(frame.to_ndarray(format="rgb24"), np.uint8)
            if now > seconds[-1] + 1 / fps:
                break
    return found
