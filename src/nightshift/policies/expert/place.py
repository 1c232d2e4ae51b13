"""Where an object is to be placed, and the obstacles on the way there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nightshift.policies.expert.geometry import Vector, crossings, extent, overlap, shape_of, tops, within
from nightshift.types import Body, Boxes

RELEASE_XY, RELEASE_Z = 0.012, 0.008  # distances from its place at which an item is released
WAY_POINTS = 8
WAY_MARGIN = 0.01  # metres that should be free beside a moving object
ANY_HEIGHT = 10.0
Z = np.array([0.0, 0.0, 1.0])


@dataclass(frozen=True, kw_only=True)
class Place:
    """Example: Place.of(scene.bodies["plate_1"], "on")"""

    body: Body
    inside: bool
    rest: float  # height the underside comes to rest at

    @classmethod
    def of(cls, body: Body, predicate: str) -> Place:
        inside = predicate == "in"
        if body.boxes is None:
            half = float(body.half_size[2])
            return cls(body=body, inside=inside, rest=float(body.position[2]) + (-half if inside else half))
        return cls(body=body, inside=inside, rest=_support(body))

    @property
    def position(self) -> Vector:
        return self.body.position

    def is_below(self, item: Body, rest: float) -> bool:
        """Whether `item` is near enough to be released, if it comes to rest at height `rest`."""
        offset = self.position - item.position
        return bool(np.linalg.norm(offset[:2]) < RELEASE_XY and bottom_of(item) - rest < RELEASE_Z)

    def holds(self, item: Body) -> bool:
        """Whether `item` is there already."""
        offset = self.position - item.position
        if self.inside and self.body.boxes is None:
            return bool((np.abs(offset) < np.abs(self.body.rotation @ self.body.half_size)).all())
        return bool(np.linalg.norm(offset[:2]) < 2 * RELEASE_XY and bottom_of(item) - self.rest < RELEASE_Z)


def bottom_of(body: Body) -> float:
    return extent(shape_of(body), Z)[0]


def top_of(body: Body) -> float:
    return extent(shape_of(body), Z)[1]


def heights_on_the_way(obstacles: Boxes, mover: Boxes, way: Vector) -> tuple[float, float]:
    """Top of all obstacles that `mover` passes above on its straight way [3], and of those it does not end above.

    -inf where there are none.
    """
    low, high = np.array([extent(mover, axis) for axis in np.eye(3)]).T
    half = (high - low) / 2 + WAY_MARGIN
    half[2] = ANY_HEIGHT
    points = (low + high) / 2 + np.linspace(0.0, 1.0, WAY_POINTS)[:, None] * way
    columns = Boxes(
        centres=points, axes=np.tile(np.eye(3), (WAY_POINTS, 1, 1)), half_sizes=np.tile(half, (WAY_POINTS, 1))
    )
    middle = (points[0] + points[-1]) / 2
    obstacles = within(obstacles, middle, float(np.linalg.norm(way) / 2 + np.hypot(half[0], half[1])), level=True)
    hit = overlap(columns, obstacles) > 0
    height = tops(obstacles)
    passed = hit.any(axis=0)
    return float(height[passed].max(initial=-np.inf)), float(height[passed & ~hit[-1]].max(initial=-np.inf))


def _support(body: Body) -> float:
    """Height of the body's surface at its centre, or its top where there is no surface."""
    enter, leave = crossings(shape_of(body), body.position[None], Z)
    through = leave[leave > enter]
    return float(body.position[2] + through.max()) if len(through) else top_of(body)
