"""Geometry of boxes: intersections with lines, depth of overlap, extent along a direction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nightshift.types import Body, Boxes

Vector = NDArray[np.float64]

_PARALLEL = 1e-9
NOTHING = Boxes(centres=np.zeros((0, 3)), axes=np.zeros((0, 3, 3)), half_sizes=np.zeros((0, 3)))


def shape_of(body: Body) -> Boxes:
    """The collision shape of an object, or the box of a region."""
    if body.boxes is not None:
        return body.boxes
    return Boxes(centres=body.position[None], axes=body.rotation[None], half_sizes=body.half_size[None])


def join(shapes: Sequence[Boxes]) -> Boxes:
    return Boxes(
        centres=np.concatenate([shape.centres for shape in shapes]),
        axes=np.concatenate([shape.axes for shape in shapes]),
        half_sizes=np.concatenate([shape.half_sizes for shape in shapes]),
    )


def select(shape: Boxes, which: slice | NDArray[np.bool_]) -> Boxes:
    return Boxes(centres=shape.centres[which], axes=shape.axes[which], half_sizes=shape.half_sizes[which])


def within(shape: Boxes, centre: Vector, radius: float, *, level: bool = False) -> Boxes:
    """Boxes whose bounding sphere comes closer to `centre` than `radius`; `level` ignores the height."""
    reach = np.linalg.norm(shape.half_sizes, axis=1) + radius
    offset = (shape.centres - centre)[:, : 2 if level else 3]
    return select(shape, np.linalg.norm(offset, axis=1) < reach)


def extent(shape: Boxes, direction: Vector) -> tuple[float, float]:
    """The lowest and the highest coordinate along a unit vector."""
    middle = shape.centres @ direction
    reach = _reach(shape, direction)
    return float((middle - reach).min()), float((middle + reach).max())


def ranges(shape: Boxes, direction: Vector) -> tuple[Vector, Vector]:
    """As `extent`, of each box [N]."""
    middle, reach = shape.centres @ direction, _reach(shape, direction)
    return np.asarray(middle - reach), np.asarray(middle + reach)


def shifted(shape: Boxes, way: Vector) -> Boxes:
    return Boxes(centres=shape.centres + way, axes=shape.axes, half_sizes=shape.half_sizes)


def turn_about(axis: Vector, angle: float) -> Vector:
    """The rotation [3, 3] by `angle` about a unit vector."""
    cross = np.cross(np.eye(3), axis)
    return np.asarray(np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross)


def rotation_vector(rotation: Vector) -> Vector:
    """Axis times angle of a rotation [3, 3], the angle from 0 to pi."""
    skew = np.array([rotation[2, 1] - rotation[1, 2], rotation[0, 2] - rotation[2, 0], rotation[1, 0] - rotation[0, 1]])
    angle = float(np.arctan2(np.linalg.norm(skew), np.trace(rotation) - 1.0))
    if angle < np.pi / 2:
        return np.asarray(skew / (2 * np.sinc(angle / np.pi)))
    # Near half a turn the skew part vanishes, and the symmetric part has the axis.
    columns = rotation + rotation.T - (np.trace(rotation) - 1.0) * np.eye(3)
    axis = columns[:, int(np.argmax(np.diag(columns)))]
    axis = axis / np.linalg.norm(axis)
    return np.asarray(angle * (axis if axis @ skew >= 0 else -axis))


def angles(rotations: Vector, other: Vector) -> Vector:
    """The angles between rotations [..., 3, 3] and another [3, 3]."""
    trace = np.einsum("...ij,ij->...", rotations, other)
    return np.asarray(np.arccos(np.clip((trace - 1.0) / 2, -1.0, 1.0)))


def _reach(shape: Boxes, direction: Vector) -> Vector:
    """How far each box [N] reaches from its centre along a unit vector."""
    projected = np.abs(direction @ shape.axes)
    return np.asarray((projected * shape.half_sizes).sum(axis=1))


def tops(shape: Boxes) -> Vector:
    """The highest point of each box [N]."""
    return np.asarray(shape.centres[:, 2] + _reach(shape, np.array([0.0, 0.0, 1.0])))


def bottoms(shape: Boxes) -> Vector:
    """The lowest point of each box [N]."""
    return np.asarray(shape.centres[:, 2] - _reach(shape, np.array([0.0, 0.0, 1.0])))


def crossings(shape: Boxes, origins: Vector, direction: Vector) -> tuple[Vector, Vector]:
    """Where lines from `origins` [L, 3] enter and leave each box [L, N]; a line that misses leaves before it enters."""
    normals = shape.axes.transpose(0, 2, 1).reshape(-1, 3)  # [3 N, 3]
    middle = (normals * np.repeat(shape.centres, 3, axis=0)).sum(axis=1)
    start = (origins @ normals.T - middle).reshape(len(origins), -1, 3)
    slope = (normals @ direction).reshape(-1, 3)
    slope = np.where(np.abs(slope) < _PARALLEL, _PARALLEL, slope)
    one, other = (-shape.half_sizes - start) / slope, (shape.half_sizes - start) / slope
    return np.minimum(one, other).max(axis=2), np.maximum(one, other).min(axis=2)


def merge(enter: Vector, leave: Vector, gap: float) -> list[tuple[float, float]]:
    """The intervals [enter, leave], with those closer together than `gap` joined."""
    hit = leave > enter
    order = np.argsort(enter[hit])
    starts, ends = enter[hit][order], np.maximum.accumulate(leave[hit][order])
    if not len(starts):
        return []
    breaks = np.flatnonzero(starts[1:] > ends[:-1] + gap)
    return [
        (float(starts[first]), float(ends[last]))
        for first, last in zip([0, *(breaks + 1)], [*breaks, len(ends) - 1], strict=True)
    ]


def overlap(one: Boxes, other: Boxes) -> Vector:
    """How deep boxes overlap [M, N] along the face normal where they do least; negative: how far they are apart.

    Edges are not compared with edges, so two boxes that pass each other edge by edge may count as touching.
    """
    return np.minimum(_overlap_along(one, other), _overlap_along(other, one).T)


def _overlap_along(one: Boxes, other: Boxes) -> Vector:
    """How deep boxes overlap [M, N] along the face normals of the first."""
    normals = one.axes.transpose(0, 2, 1).reshape(-1, 3)  # [3 M, 3]
    edges = (other.axes * other.half_sizes[:, None]).transpose(0, 2, 1).reshape(-1, 3)  # [3 N, 3]
    reaches = normals @ edges.T
    reaches = np.abs(reaches, out=reaches).reshape(len(normals), len(other.centres), 3)
    reach = reaches[..., 0] + reaches[..., 1] + reaches[..., 2]  # twice as fast as `sum` over so short an axis
    own = (normals * np.repeat(one.centres, 3, axis=0)).sum(axis=1)
    apart = np.abs(normals @ other.centres.T - own[:, None])
    depth = one.half_sizes.reshape(-1, 1) + reach - apart
    return np.asarray(depth.reshape(len(one.centres), 3, len(other.centres)).min(axis=1))
