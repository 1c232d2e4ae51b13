"""Copies of the frames that a GL context draws, fetched from the GPU together.

`mujoco.mjr_readPixels` waits for its frame: the GPU is idle while the next one is prepared, and the processor while it
is drawn. Here the GPU copies each finished frame into a buffer of its own, and only `fetch` waits. The pixels are the
same, bit for bit.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import mujoco
import numpy as np
from numpy.typing import NDArray

from nightshift.errors import SimulatorError

_FRAMEBUFFER, _READ_FRAMEBUFFER, _DRAW_FRAMEBUFFER = 0x8D40, 0x8CA8, 0x8CA9
_COLOR_ATTACHMENT0, _COLOR_BUFFER_BIT = 0x8CE0, 0x4000
_PIXEL_PACK_BUFFER, _STREAM_READ, _PACK_ALIGNMENT = 0x88EB, 0x88E1, 0x0D05
_RGB, _BGR, _UNSIGNED_BYTE, _NEAREST = 0x1907, 0x80E0, 0x1401, 0x2600
_RENDERER = 0x1F01
"""From the registry of OpenGL."""
CHANNELS = 3
_SOFTWARE = (b"llvmpipe", b"softpipe", b"swrast")
"""Mesa's renderers without a GPU."""


class GlCalls(NamedTuple):
    """GL's functions for one context, looked up once: for every look it took a third of what Python spends on a frame.

    Python's GIL stays with the thread in calls that only add to the GPU's queue: threads that simulate would take it in
    between, and a frame needs several such calls. The call that waits lets the GIL go.
    """

    queueing: Any
    copying: Any
    """Of a frame. Where a CPU draws, that waits for the frame."""
    waiting: Any

    @classmethod
    def of_current_context(cls) -> GlCalls:
        waiting = importlib.import_module("OpenGL.platform").PLATFORM.GL
        queueing = ctypes.PyDLL(waiting._name)
        return cls(queueing, waiting if _draws_in_software(queueing) else queueing, waiting)


class FrameCopies:
    """Room for `count` frames of each view of a context, which must be current from here to `begin` and in `fetch`.

    Example:
        copies = FrameCopies(context, GlCalls.of_current_context(), count=2, sizes=[128])
        for row in range(2):
            mujoco.mjr_render(area, scene, context)
            copies.add(row, view=0)
        copies.begin()
        …                        # frames of this or another context may be drawn now
        (frames,) = copies.fetch()
    """

    def __init__(
        self, context: mujoco.MjrContext, gl: GlCalls, count: int, sizes: Sequence[int], *, rotated: bool = False
    ) -> None:
        """`sizes`: of the frames of each view, which are square. `rotated`: for `turned`."""
        self._context = context
        self._calls = gl
        self._rotated = rotated
        self._shapes = [(count, size, size, CHANNELS) for size in sizes]
        ends = itertools.accumulate(map(math.prod, self._shapes), initial=0)
        self._parts = [slice(start, end) for start, end in itertools.pairwise(ends)]
        """Of the buffer: the frames of each view."""
        while gl.queueing.glGetError():
            pass  # errors from before are not those of these frames
        self._buffer = ctypes.c_uint()
        gl.queueing.glGenBuffers(1, ctypes.byref(self._buffer))
        gl.queueing.glBindBuffer(_PIXEL_PACK_BUFFER, self._buffer)
        gl.queueing.glBufferData(_PIXEL_PACK_BUFFER, ctypes.c_ssize_t(self._parts[-1].stop), None, _STREAM_READ)
        gl.queueing.glPixelStorei(_PACK_ALIGNMENT, 1)

    def add(self, row: int, view: int) -> None:
        """Copy the frame that was drawn last, at the lower left of the context's offscreen buffer."""
        gl, drawn, resolved = self._calls.copying, self._context.offFBO, self._context.offFBO_r
        _, height, width, _ = self._shapes[view]
        gl.glBindFramebuffer(_READ_FRAMEBUFFER, drawn)
        gl.glReadBuffer(_COLOR_ATTACHMENT0)
        if self._context.offSamples:
            gl.glBindFramebuffer(_DRAW_FRAMEBUFFER, resolved)
            gl.glDrawBuffer(_COLOR_ATTACHMENT0)
            gl.glBlitFramebuffer(0, 0, width, height, 0, 0, width, height, _COLOR_BUFFER_BIT, _NEAREST)
            gl.glBindFramebuffer(_READ_FRAMEBUFFER, resolved)
            gl.glReadBuffer(_COLOR_ATTACHMENT0)
        offset = ctypes.c_void_p(self._parts[view].start + row * height * width * CHANNELS)
        gl.glReadPixels(0, 0, width, height, _BGR if self._rotated else _RGB, _UNSIGNED_BYTE, offset)
        gl.glBindFramebuffer(_FRAMEBUFFER, drawn)

    def begin(self) -> None:
        """All frames are added: let the GPU draw them now, while this thread does something else."""
        self._calls.queueing.glBindBuffer(_PIXEL_PACK_BUFFER, 0)
        self._calls.copying.glFlush()
        self._check()  # before other frames are begun, whose errors are not those of these

    def fetch(self) -> list[NDArray[np.uint8]]:
        """All frames of each view, [count, size, size, 3], the lowest row first, and blue first in those for `turned`.
        Frees the buffer."""
        fetched = np.empty(self._parts[-1].stop, np.uint8)
        size, target = ctypes.c_ssize_t(fetched.nbytes), ctypes.c_void_p(fetched.ctypes.data)
        self._calls.queueing.glBindBuffer(_PIXEL_PACK_BUFFER, self._buffer)
        self._calls.waiting.glGetBufferSubData(_PIXEL_PACK_BUFFER, ctypes.c_ssize_t(0), size, target)
        self._check()
        self.close()
        return [fetched[part].reshape(shape) for part, shape in zip(self._parts, self._shapes, strict=True)]

    def _check(self) -> None:
        if error := self._calls.queueing.glGetError():
            self.close()
            what = f"GL reports the error {error:#x} while camera images are drawn"
            raise SimulatorError(what, "if the GPU is out of memory, lower env.cameras.size or machine.workers")

    def close(self) -> None:
        """Free the buffer, if `fetch` has not done so."""
        if self._buffer:
            self._calls.queueing.glBindBuffer(_PIXEL_PACK_BUFFER, 0)
            self._calls.queueing.glDeleteBuffers(1, ctypes.byref(self._buffer))
            self._buffer = ctypes.c_uint()


def turned(frames: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Frames [N, S, S, 3] with blue first, by 180 degrees and with red first: all bytes of each in reverse. To reverse
    rows and columns instead takes ten times as long, as it copies three bytes at a time."""
    return np.ascontiguousarray(frames.reshape(len(frames), -1)[:, ::-1]).reshape(frames.shape)


def _draws_in_software(gl: Any) -> bool:
    """Of the context that is current."""
    gl.glGetString.restype = ctypes.c_char_p
    drawn_by = gl.glGetString(_RENDERER) or b""
    return any(renderer in drawn_by for renderer in _SOFTWARE)
