"""Geoms that cannot be seen in an image, so that they need not be drawn. The pixels are the same, bit for bit.

Of all faces in a scene, the wrist's camera sees a third to a half. A CPU saves their vertices; a GPU saves most where a
mirror is out of sight, for which MuJoCo draws the whole scene a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mujoco
import numpy as np
from numpy.typing import NDArray

from nightshift.envs.libero.setup import prepare

Geoms = NDArray[np.int64]
"""Numbers [N] of a model's geoms."""

COLLISION_GROUP = 0
"""The group of geoms that no camera shows."""
_NO_MIRROR = -1
_PLANE, _BOX = mujoco.mjtGeom.mjGEOM_PLANE.value, mujoco.mjtGeom.mjGEOM_BOX.value


class Culling:
    """What cameras of one model cannot see.

    MuJoCo draws a second time what the first box or plane that mirrors shows. So a geom may be in the image of the
    camera itself, or in the mirror's. And a light that casts shadows may throw that of any geom into the image. In
    scenes of another kind nothing counts as unseen.
    """

    def __init__(self, model: mujoco.MjModel) -> None:
        prepare()
        from nightshift.envs.libero import pyramids  # it compiles: `prepare` must have set the cache folder

        self._mark = pyramids.mark_seen
        self._model = model
        shown = model.geom_group != COLLISION_GROUP
        bounded = model.geom_rbound > 0  # planes, which may have no end, are not
        self._geoms: Geoms = (shown & bounded).nonzero()[0]
        self._bounds = model.geom_aabb[self._geoms]
        mirrors = (shown & _reflects(model, model.geom_type, model.geom_matid)).nonzero()[0].tolist()
        self._mirror = mirrors[0] if mirrors else _NO_MIRROR
        self._mirrors_anything = (
            len(mirrors) > 1  # without the first one MuJoCo would draw what the next one shows
            or any(model.geom_type[mirror] == _PLANE for mirror in mirrors)
            or bool(_reflects(model, model.site_type, model.site_matid).any())
        )
        self._casts_shadows = bool(model.light_castshadow.any())
        self._is_pyramid = (model.cam_orthographic == 0) & ~model.cam_sensorsize.any(axis=1)
        """By camera: whether what it sees is a pyramid about its axis, which its field of view describes."""

    @contextmanager
    def hidden(self, data: mujoco.MjData, camera: int, *, shadows: bool) -> Iterator[None]:
        """Until the end of the context, the model's geoms that are not seen are in the group that is not drawn."""
        unseen = self.unseen(data, camera, shadows=shadows)
        groups = self._model.geom_group[unseen]
        self._model.geom_group[unseen] = COLLISION_GROUP
        try:
            yield
        finally:
            self._model.geom_group[unseen] = groups

    def unseen(self, data: mujoco.MjData, camera: int, *, shadows: bool) -> Geoms:
        """Geoms that change no pixel of a square image. `shadows`: whether shadows and mirrors are drawn."""
        if not self._is_pyramid[camera] or (shadows and (self._casts_shadows or self._mirrors_anything)):
            return self._geoms[:0]
        seen: NDArray[np.bool_] = np.zeros(len(self._geoms), np.bool_)
        geoms = data.geom_xpos, data.geom_xmat, self._geoms, self._bounds
        eye = data.cam_xpos[camera], data.cam_xmat[camera], self._model.cam_fovy[camera]
        mirror = self._mirror if shadows else _NO_MIRROR
        self._mark(seen, geoms, eye, (mirror, self._model.geom_size[mirror]))
        return self._geoms[~seen]


def _reflects(model: mujoco.MjModel, types: NDArray[np.int32], materials: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Of geoms or sites."""
    flat = np.isin(types, (_PLANE, _BOX))
    reflectance = np.append(model.mat_reflectance, 0)  # the last is that of what has no material, number -1
    reflects: NDArray[np.bool_] = flat & (reflectance[materials] > 0)
    return reflects
