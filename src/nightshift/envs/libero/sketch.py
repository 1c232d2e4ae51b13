"""Models that draw fast where a CPU draws and people alone look: most of the time goes into vertices of fine meshes."""

from __future__ import annotations

import copy

import mujoco
import numpy as np
from numpy.typing import NDArray

CELL = 0.005
"""Metres: vertices of a mesh in one cell of this size become one. A pixel of the scene at 256² shows about as much."""
FEW_FACES = 1000
"""Meshes of fewer faces stay as they are: the fingers, which the wrist's camera sees from near, are among them."""


def sketched(model: mujoco.MjModel) -> mujoco.MjModel:
    """A copy to make a GL context with: coarser meshes, no antialiasing, and no room for shadows.

    Simulate and place geoms with the model itself; both have the same meshes under the same numbers.
    """
    coarse = copy.copy(model)
    coarse.vis.quality.offsamples = 0
    coarse.vis.quality.shadowsize = 0
    for mesh in range(coarse.nmesh):
        if coarse.mesh_facenum[mesh] >= FEW_FACES:
            _coarsen(coarse, mesh)
    return coarse


def _coarsen(model: mujoco.MjModel, mesh: int) -> None:
    """Keep the faces whose corners lie in three cells, once each; every corner keeps its normal and texture."""
    first, count = model.mesh_faceadr[mesh], model.mesh_facenum[mesh]
    vertices = model.mesh_vert[model.mesh_vertadr[mesh] :][: model.mesh_vertnum[mesh]]
    faces = _representatives(vertices)[model.mesh_face[first : first + count]]
    kept = _distinct(faces)
    model.mesh_face[first : first + len(kept)] = faces[kept]
    for corners in (model.mesh_facenormal, model.mesh_facetexcoord):
        corners[first : first + len(kept)] = corners[first + kept]
    model.mesh_facenum[mesh] = len(kept)


def _representatives(vertices: NDArray[np.float32]) -> NDArray[np.int32]:
    """For every vertex [N, 3] the number of the first one in its cell."""
    cells = np.floor(vertices / CELL).astype(np.int64)
    _, first, cell = np.unique(cells, axis=0, return_index=True, return_inverse=True)
    return first[cell.reshape(-1)].astype(np.int32)


def _distinct(faces: NDArray[np.int32]) -> NDArray[np.int64]:
    """The numbers of the faces [N, 3] with three different corners, each triangle once."""
    corners = np.sort(faces, axis=1)
    _, first = np.unique(corners, axis=0, return_index=True)
    flat = (corners[first, 0] == corners[first, 1]) | (corners[first, 1] == corners[first, 2])
    return np.sort(first[~flat])
