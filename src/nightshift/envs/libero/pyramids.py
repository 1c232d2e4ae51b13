"""Which boxes a camera sees, itself or in a mirror, by one compiled call. Import it after `prepare`."""

from __future__ import annotations

import numba
import numpy as np

MARGIN = 1e-3
"""Metres by which a box has to be outside: the GPU computes in single precision."""


@numba.njit(cache=True, error_model="numpy")
def mark_seen(seen, geoms, camera, mirror):  # type: ignore[no-untyped-def]
    """Set `seen` [N] where the box around a geom may be in a square image.

    `geoms`: positions [G, 3] and axes [G, 9] of all geoms, the numbers [N] of those that are asked for, and the boxes
    around them [N, 6], their centres and half sizes in the axes of the geom. `camera`: position, axes [9] and vertical
    field of view in degrees. `mirror`: the number of the geom whose upper side mirrors, or -1, and its half sizes.
    """
    positions, axes, numbers, _ = geoms
    eye, view, angle = camera
    view = view.reshape(3, 3)
    half = np.tan(np.deg2rad(angle) / 2)
    _mark(seen, geoms, eye, eye - view[:, 2], half * view[:, 0], half * view[:, 1])
    number, size = mirror
    for k in range(len(numbers)):
        if numbers[k] == number and seen[k]:
            own = axes[number].copy().reshape(3, 3)
            normal = own[:, 2].copy()
            middle = positions[number] + size[2] * normal
            height = np.sum((eye - middle) * normal)
            if height > 0:  # what it shows is what an eye behind it would see through it
                _mark(seen, geoms, eye - 2 * height * normal, middle, size[0] * own[:, 0], size[1] * own[:, 1])


@numba.njit(cache=True, error_model="numpy")
def _mark(seen, geoms, apex, middle, side, up):  # type: ignore[no-untyped-def]
    """Set `seen` where a box may meet the pyramid from `apex` through the rectangle with this middle and these half
    edges. Some that are near an edge of the pyramid count too."""
    positions, axes, numbers, bounds = geoms
    corners = np.empty((4, 3))
    corners[0], corners[1] = middle - side - up, middle + side - up
    corners[2], corners[3] = middle + side + up, middle - side + up
    inwards = np.empty((4, 3))
    for plane in range(4):
        inwards[plane] = _cross(corners[plane] - apex, corners[(plane + 1) % 4] - apex)
        inwards[plane] /= np.sqrt(np.sum(inwards[plane] ** 2)) * np.sign(np.sum(inwards[plane] * (middle - apex)))
    for k in range(len(numbers)):
        own = axes[numbers[k]]
        meets = True
        for plane in range(4):
            depth = reach = 0.0
            for axis in range(3):
                along = 0.0
                for row in range(3):
                    along += inwards[plane, row] * own[3 * row + axis]
                depth += inwards[plane, axis] * (positions[numbers[k], axis] - apex[axis]) + along * bounds[k, axis]
                reach += abs(along) * bounds[k, 3 + axis]
            meets &= depth >= -reach - MARGIN
        seen[k] |= meets


@numba.njit(cache=True, error_model="numpy")
def _cross(a, b):  # type: ignore[no-untyped-def]
    """np.cross would take numba twice as long to compile as all of this file."""
    return np.array((a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]))
