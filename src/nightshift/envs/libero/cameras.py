"""Camera images of LIBERO simulations. One GL context draws all simulations of a compiled model.

A context takes seconds to make and holds textures, meshes and a shadow map, so simulations share it. GL binds a context
to a thread: the thread that draws first must draw everything.
"""

from __future__ import annotations

import atexit
import importlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import mujoco
import numpy as np
from numpy.typing import NDArray

from nightshift.envs.base import Drawing, Pixels
from nightshift.envs.libero.culling import COLLISION_GROUP, Culling
from nightshift.envs.libero.frames import FrameCopies, GlCalls, turned
from nightshift.envs.libero.setup import NO_GL, prepare
from nightshift.envs.libero.sketch import sketched
from nightshift.errors import SimulatorError

Image = NDArray[np.uint8]

CAMERA_NAMES = {"agentview": "agentview", "wrist": "robot0_eye_in_hand"}
"""The suite's cameras by their names in LIBERO's models."""
FILMED = "agentview"
MAX_GEOMS = 10_000
"""That a scene may show; mujoco's renderer has room for as many."""
_FRAMES_AT_ONCE = 32
"""That wait for the GPU together."""


_ABANDONED: list[_Context] = []
"""Contexts that were closed in another thread than theirs. They stay until the process ends: freeing one there would
free the objects of the context that is current in that thread."""


@dataclass(frozen=True, eq=False)
class Dress:
    """What a simulation looks like: its model, and the textures and meshes by which that differs from the one that the
    GL context was made with."""

    model: mujoco.MjModel
    textures: frozenset[int] = frozenset()
    meshes: frozenset[int] = frozenset()

    @cached_property
    def culling(self) -> Culling:
        """Of the model as it is when it is drawn first."""
        return Culling(self.model)


class _Look(NamedTuple):
    """Images that are asked for together."""

    simulations: Iterator[mujoco.MjData]
    """Those that are not drawn yet."""
    drawing: Drawing
    """Of these cameras."""
    dress: Dress


class CameraRenderer:
    """Draws the simulations of one model. The context is made when the first image is drawn, by that thread.

    Example:
        renderer = CameraRenderer(model, drawing, film_size=256)
        images = renderer.images([data], 1, ["agentview"])["agentview"]  # [1, S, S, 3]
    """

    def __init__(self, model: mujoco.MjModel, drawing: Drawing, film_size: int) -> None:
        self._model = model
        self._drawing = drawing
        self._film_size = film_size
        self._option = mujoco.MjvOption()
        self._option.geomgroup[COLLISION_GROUP] = 0
        self._views = {camera: _view(model.camera(name).id) for camera, name in CAMERA_NAMES.items()}
        self._context: _Context | None = None
        self._dress = self._plain = Dress(model)
        """Whose textures and meshes the context has."""
        self._thread: int | None = None
        self._failed = False
        self._is_sketch = False
        self._films: CameraRenderer | None = None
        """What draws for people, where others see the camera images."""

    def images(
        self, simulations: Iterable[mujoco.MjData], count: int, cameras: Sequence[str], dress: Dress | None = None
    ) -> dict[str, Image]:
        """Observations [count, S, S, 3] by camera, as `Drawing` says. A simulation is asked for when the one before it
        is drawn."""
        return self.begin_images(simulations, count, cameras, dress)()

    def begin_images(
        self, simulations: Iterable[mujoco.MjData], count: int, cameras: Sequence[str], dress: Dress | None = None
    ) -> Callable[[], dict[str, Image]]:
        """What `images` gives, once it is called. The GPU draws the first frames meanwhile."""
        if not self.can_draw():
            raise SimulatorError("camera images cannot be drawn: no GL library works here", NO_GL)
        chosen = replace(self._drawing, cameras={camera: self._drawing.cameras[camera] for camera in cameras})
        return self._begin(simulations, count, chosen, dress)

    def film_frame(self, data: mujoco.MjData, dress: Dress | None = None) -> Image | None:
        """An upright image for people; None where no GL library works. Shadows would take four times as long."""
        if self._films is not None:
            return self._films.film_frame(data, dress)
        if not self.can_draw():
            return None
        cameras = {FILMED: Pixels(self._film_size, self._film_size)}
        film = Drawing(cameras=cameras, rotated=False, shadows=False)
        return self._begin([data], 1, film, dress)()[FILMED][0, ::-1]

    def sketch(self, *, films_alone: bool = False) -> None:
        """Draw fast and coarsely from the first image on: all images, or films alone, in a context of their own."""
        assert self._context is None, "a context is made with or without"
        if films_alone:
            self._films = CameraRenderer(self._model, self._drawing, self._film_size)
            self._films.sketch()
        else:
            self._is_sketch = True

    def can_draw(self) -> bool:
        if self._context is None and not self._failed:
            model = sketched(self._model) if self._is_sketch else self._model
            resolutions = [pixels.resolution for pixels in self._drawing.cameras.values()]
            self._context = _open_context(model, max([*resolutions, self._film_size]))
            self._failed = self._context is None
            self._thread = threading.get_ident()
            # Registered after the GL backend's own handler, so it runs before GL is shut down at exit.
            atexit.register(_close, weakref.ref(self))
        return self._context is not None

    def close(self) -> None:
        """Nothing can be drawn afterwards."""
        if self._films is not None:
            self._films.close()
        if self._context is not None:
            if threading.get_ident() == self._thread:
                self._context.free()
            else:
                _ABANDONED.append(self._context)
        self._context, self._failed = None, True

    def __del__(self) -> None:
        self.close()

    def _put_on(self, dress: Dress) -> None:
        """Send the textures and meshes that differ from those in the context to the GPU."""
        assert self._context is not None
        if dress is self._dress:
            return
        for texture in self._dress.textures | dress.textures:
            mujoco.mjr_uploadTexture(dress.model, self._context.mjr, texture)
        for mesh in self._dress.meshes | dress.meshes:
            mujoco.mjr_uploadMesh(dress.model, self._context.mjr, mesh)
        self._dress = dress

    def _begin(
        self, simulations: Iterable[mujoco.MjData], count: int, drawing: Drawing, dress: Dress | None
    ) -> Callable[[], dict[str, Image]]:
        """What gives [count, S, S, 3] by camera, the lowest row first before they are rotated, as LIBERO's own."""
        look = _Look(iter(simulations), drawing, dress or self._plain)
        at_once = max(1, _FRAMES_AT_ONCE // len(drawing.cameras))
        counts = [min(at_once, count - start) for start in range(0, count, at_once)]
        begun = self._begun(look, counts[0])
        return lambda: _joined([_finished(frames, drawing) for frames in self._frames(begun, look, counts[1:])])

    def _frames(self, begun: FrameCopies, look: _Look, counts: Sequence[int]) -> Iterator[list[Image]]:
        """As they are drawn, some at a time: the GPU draws the next ones while the caller works on these. `counts`: of
        simulations that are yet to be drawn."""
        assert self._context is not None
        self._context.gl.make_current()
        try:
            for count in counts:
                frames = begun.fetch()
                begun = self._begun(look, count)
                yield frames
            yield begun.fetch()
        finally:
            begun.close()

    def _begun(self, look: _Look, count: int) -> FrameCopies:
        """The views of the next `count` simulations, which the GPU has begun to draw."""
        self._prepare(look)
        context = self._context
        assert context is not None
        model, scene, everything = look.dress.model, context.scene, mujoco.mjtCatBit.mjCAT_ALL.value
        areas = {camera: pixels.resolution for camera, pixels in look.drawing.cameras.items()}
        copies = FrameCopies(context.mjr, context.calls, count, list(areas.values()), rotated=look.drawing.rotated)
        try:
            for row, data in enumerate(islice(look.simulations, count)):
                for view, (camera, size) in enumerate(areas.items()):
                    seen = self._views[camera]
                    with look.dress.culling.hidden(data, seen.fixedcamid, shadows=look.drawing.shadows):
                        mujoco.mjv_updateScene(model, data, self._option, None, seen, everything, scene)
                    mujoco.mjr_render(mujoco.MjrRect(0, 0, size, size), scene, context.mjr)
                    copies.add(row, view)
        except BaseException:
            copies.close()
            raise
        copies.begin()
        return copies

    def _prepare(self, look: _Look) -> None:
        """Other looks may have been begun in this thread since."""
        assert self._context is not None
        if threading.get_ident() != self._thread:
            raise SimulatorError(
                "a GL context draws in the thread that made it, and another thread asked for an image",
                "call look, render and camera_images of all fleets of a task from one thread",
            )
        self._context.gl.make_current()
        self._put_on(look.dress)
        scene = self._context.scene
        scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = look.drawing.shadows
        scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = look.drawing.shadows


def _view(camera: int) -> mujoco.MjvCamera:
    view = mujoco.MjvCamera()
    view.type = mujoco.mjtCamera.mjCAMERA_FIXED
    view.fixedcamid = camera
    return view


class _Context:
    """A GL context, and mujoco's objects in it."""

    def __init__(self, backend: str, model: mujoco.MjModel, size: int) -> None:
        self.gl: Any = importlib.import_module(f"mujoco.{backend}").GLContext(size, size)
        self.gl.make_current()
        model.vis.global_.offwidth = model.vis.global_.offheight = size
        self.scene = mujoco.MjvScene(model=model, maxgeom=MAX_GEOMS)
        self.mjr = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150.value)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self.mjr)
        self.calls = GlCalls.of_current_context()

    def free(self) -> None:
        self.gl.make_current()
        self.mjr.free()
        self.gl.free()


def _finished(frames: Sequence[Image], drawing: Drawing) -> dict[str, Image]:
    """Averaged before they are rotated: fewer pixels have to be moved."""
    smaller = {camera: averaged(own, size) for (camera, size), own in zip(drawing.sizes.items(), frames, strict=True)}
    return {camera: turned(own) for camera, own in smaller.items()} if drawing.rotated else smaller


def _joined(parts: Sequence[Mapping[str, Image]]) -> dict[str, Image]:
    return {camera: np.concatenate([part[camera] for part in parts]) for camera in parts[0]}


def averaged(pixels: Image, size: int) -> Image:
    """Images [N, S, S, 3] as [N, size, size, 3]: each pixel the mean over an area, rounded to the nearest. `size`
    divides S."""
    factor = pixels.shape[1] // size
    if factor == 1:
        return pixels
    prepare()
    from nightshift.envs.libero.averaging import average  # it compiles: `prepare` must have set the cache folder

    smaller = np.empty((len(pixels), size, size, pixels.shape[3]), np.uint8)
    average(pixels, factor, smaller)
    return smaller


def works() -> bool:
    """Whether a GL library works here, tested by drawing into it."""
    prepare()
    context = _open_context(mujoco.MjModel.from_xml_string("<mujoco/>"), size=16)
    if context is None:
        return False
    context.free()
    return True


def check() -> None:
    if not works():
        raise SimulatorError("env.cameras.names asks for camera images, but no GL library works here", NO_GL)


def _open_context(model: mujoco.MjModel, size: int) -> _Context | None:
    """None where no GL library works: every backend fails in its own way, so any error counts."""
    backend = os.environ["MUJOCO_GL"]
    if backend not in ("egl", "osmesa"):
        return None
    try:
        return _Context(backend, model, size)
    except Exception:  # noqa: BLE001
        return None


def _close(renderer: weakref.ref[CameraRenderer]) -> None:
    alive = renderer()
    if alive is not None:
        alive.close()
