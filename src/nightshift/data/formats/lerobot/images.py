"""Encoding and decoding of images: PNG is lossless, MP4 is not."""

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
"""Near lossless, with a key frame every other frame for fast random access in training."""
_PNG_EFFORT = 1
_FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "BMP")
"""PIL knows many more, some of which start other programs."""
_DEMUXER = "mp4"
"""Not left to FFmpeg's guess: it would follow a playlist in the place of a video to any file or address."""


def to_png(image: NDArray[np.uint8]) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "PNG", compress_level=_PNG_EFFORT)
    return stream.getvalue()


def from_file(content: bytes, shape: tuple[int, ...], where: str) -> NDArray[Any]:
    """Decode an image to [H, W, channels] without changing its values; DataError unless it has this shape.

    The size is checked before the pixels are decoded: a kilobyte of PNG can hold gigabytes of them.
    """
    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            if image.mode == "P":
                raise DataError(f"{where} has a palette", "convert it to RGB")
            if (image.height, image.width) != shape[:2]:
                raise _wrong_size(where, (image.height, image.width, len(image.getbands())), shape)
            values = np.asarray(image)
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{where} is not a readable image: {error}", "convert the dataset again") from None
    values = values if values.ndim > 2 else values[..., None]  # noqa: PLR2004 - grey images have no channel axis
    if values.shape != shape:
        raise _wrong_size(where, values.shape, shape)
    return values


def _wrong_size(where: str, found: tuple[int, ...], declared: tuple[int, ...]) -> DataError:
    return DataError(f"{where} has images of {list(found)}, but {list(declared)} is declared", "correct meta/info.json")


def write_video(path: Path, frames: Frames, fps: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    _, height, width, _ = frames.shape
    with av.open(path, "w") as video:
        stream: Any = video.add_stream(CODEC, rate=fps, options=_OPTIONS)
        stream.width, stream.height, stream.pix_fmt = width, height, PIXELS
        for image in frames:
            video.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        video.mux(stream.encode())


def read_video(path: Path, seconds: Sequence[float], fps: float, shape: tuple[int, ...], where: str) -> Frames:
    """The frames at these ascending times; DataError if there is no frame within half a frame interval of one."""
    try:
        found = _decode(path, np.asarray(seconds, np.float64), fps, shape, where)
    except FileNotFoundError:
        raise DataError(f"{where}: the video {path} is missing", "download the dataset again") from None
    except (av.FFmpegError, ValueError, IndexError, OverflowError) as error:
        raise DataError(f"{where}: the video {path} is not readable: {error}", "download the dataset again") from None
    missing = [second for second, image in zip(seconds, found, strict=True) if image is None]
    if missing:
        raise DataError(
            f"{where}: the video {path} has no frame at {missing[0]:.3f} s ({len(missing)} are missing)",
            "download the dataset again",
        )
    return np.stack([image for image in found if image is not None])


def _decode(
    path: Path, seconds: NDArray[np.float64], fps: float, shape: tuple[int, ...], where: str
) -> list[NDArray[np.uint8] | None]:
    found: list[NDArray[np.uint8] | None] = [None] * len(seconds)
    nearest = [0.5 / fps] * len(seconds)
    with av.open(path, format=_DEMUXER, options={"protocol_whitelist": "file"}) as video:
        stream = video.streams.video[0]
        _check_size(stream.height, stream.width, shape, where)
        base = stream.time_base or Fraction(1, 1)
        video.seek(max(0, int(seconds[0] / base)), stream=stream)
        for frame in video.decode(stream):
            _check_size(frame.height, frame.width, shape, where)
            now = float((frame.pts or 0) * base)
            location = int(np.argmin(np.abs(seconds - now)))
            if abs(seconds[location] - now) < nearest[location]:
                nearest[location] = abs(seconds[location] - now)
                found[location] = np.asarray(frame.to_ndarray(format="rgb24"), np.uint8)
            if now > seconds[-1] + 1 / fps:
                break
    return found


def _check_size(height: int, width: int, shape: tuple[int, ...], where: str) -> None:
    if (height, width, 3) != shape:
        raise _wrong_size(where, (height, width, 3), shape)
