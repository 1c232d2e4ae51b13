"""Where an object is to be placed, and the obstacles on the way there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from nightshift.policies.expert.geometry import (
    Vector,
    bottoms,
    crossings,
    extent,
    join,
    overlap,
    ranges,
    select,
    shape_of,
    tops,
    within,
)
from nightshift.policies.expert.robot import strain
from nightshift.types import Body, Boxes

RELEASE_XY, RELEASE_Z = 0.012, 0.008  # distances from its place at which an item is released
WAY_STEP = 0.02  # metres between two points of a way
FEET = 3  # points along each side of an item's underside
WAY_MARGIN = 0.01  # metres that should be free beside a moving object
NEARER = 0.001  # metres by which something must come nearer to count as ahead
ANY_HEIGHT = 10.0
BELOW_TOP, ABOVE_TOP = 0.005, 0.10  # metres around the top of a region between which something is on it
LEVEL = 0.99  # cosine of the incline up to which a region counts as level
SHARED = 0.75  # of a region's half size: items that share it are put no further from its middle
SPOTS = (-0.6, -0.4, -0.2, 0.0, 0.2, 0.4, 0.6)  # of a region's half size from its middle, where an item may go
LOWERED = (0.01, 0.05, 0.1, 0.15)  # metres above its rest at which a lowered item must not hit anything
SPOT_DEPTH = 0.05  # metres of collision per metre away from the middle that are worse
OFF_MIDDLE = 0.7  # of a region's half size that a place may be away from its middle
FOOT = 0.01  # metres above its lowest point up to which an item may stand on something
Z = np.array([0.0, 0.0, 1.0])


@dataclass(frozen=True, kw_only=True)
class Place:
    """Example: Place.of(scene.bodies["plate_1"], "on")"""

    body: Body
    inside: bool
    rest: float  # height the underside comes to rest at
    position: Vector  # [3] where the item's position should come to be; the height is that of the body
    crowded: bool = False  # walls stand close: a drawer that something hangs over

    @classmethod
    def of(cls, body: Body, predicate: str, sharing: Sequence[Body] = (), number: int = 0) -> Place:
        """`sharing`: the items that go to the same region, of which this place is for `number`."""
        inside = predicate == "in"
        if body.boxes is not None:
            return cls(body=body, inside=inside, rest=surface_of(body), position=body.position)
        half = float(body.half_size[int(np.argmax(np.abs(body.rotation[2])))])
        rest = float(body.position[2]) + (-half if inside else half)
        position = body.position if inside else _spot(body, sharing, number)
        return cls(body=body, inside=inside, rest=rest, position=position)

    @property
    def is_surface(self) -> bool:
        """Whether it is a region on top of something, whose own height may be inside that."""
        return not self.inside and self.body.boxes is None

    def is_below(self, item: Body, rest: float) -> bool:
        """Whether `item` is near enough to be released, if it comes to rest at height `rest`."""
        offset = self.position - item.position
        return bool(np.linalg.norm(offset[:2]) < RELEASE_XY and bottom_of(item) - rest < RELEASE_Z)

    def holds(self, item: Body, rest: float) -> bool:
        """Whether `item` is there already, if it comes to rest at height `rest`."""
        offset = item.position - self.body.position
        if self.inside and self.body.boxes is None:
            return bool((np.abs(offset) < np.abs(self.body.rotation @ self.body.half_size)).all())
        if self.is_surface:
            return self._is_over(offset) and bottom_of(item) - rest < RELEASE_Z
        return bool(np.linalg.norm(offset[:2]) < 2 * RELEASE_XY and bottom_of(item) - rest < RELEASE_Z)

    def _is_over(self, offset: Vector) -> bool:
        """As LIBERO's On judges it: in the rows of the region's rotation."""
        seen, half = self.body.rotation @ offset, self.body.half_size
        return bool((np.abs(seen[:2]) < half[:2]).all() and half[2] - BELOW_TOP < seen[2] < half[2] + ABOVE_TOP)


def _spot(region: Body, sharing: Sequence[Body], number: int) -> Vector:
    """In a region: its middle, in a row with other items that share it, and up along a region that is inclined."""
    normal = region.rotation[2]
    if abs(normal[2]) < LEVEL:
        return np.asarray(region.position + normal * (ABOVE_TOP / 2))
    if not sharing:
        return region.position
    along = min(range(2), key=lambda axis: sum(_room(sharing, region.rotation[axis])))
    rooms = _room(sharing, region.rotation[along])
    aside = sum(rooms[:number]) + (rooms[number] - sum(rooms)) / 2
    most = SHARED * float(region.half_size[along])
    return np.asarray(region.position + float(np.clip(aside, -most, most)) * region.rotation[along])


def _room(items: Sequence[Body], axis: Vector) -> list[float]:
    """What each item needs along an axis, with its position in the middle and free margins."""
    ends = [np.array(extent(shape_of(item), axis)) - item.position @ axis for item in items]
    return [2 * (float(np.abs(end).max()) + WAY_MARGIN) for end in ends]


def reachable(place: Place, item: Body, foot: Vector | None) -> Place:
    """A place on a level region, as much nearer to the arm's foot as the arm would stretch with the item there."""
    if foot is None or not place.is_surface or abs(place.body.rotation[2, 2]) < LEVEL:
        return place
    grip = np.append(place.position[:2], place.rest + top_of(item) - bottom_of(item))
    stretch = float(strain(foot, grip[None])[0])
    if stretch <= 0.0:
        return place
    way = (foot - place.position)[:2] / np.linalg.norm((foot - place.position)[:2])
    room = OFF_MIDDLE * float(place.body.half_size[:2].min())
    step = min(2 * stretch, room)
    return replace(place, position=place.position + np.append(step * way, 0.0))


def free_spot(place: Place, item: Body, obstacles: Boxes) -> Vector:
    """Where in a region the item can be lowered with the fewest collisions, and then the nearest to the middle."""
    low, high = np.array([extent(shape_of(item), axis) for axis in np.eye(3)]).T
    room = np.abs(place.body.rotation) @ place.body.half_size
    spots = place.position + np.array([[x * room[0], y * room[1], 0.0] for x in SPOTS for y in SPOTS])
    to_spots = spots - item.position
    to_spots[:, 2] = place.rest + LOWERED[0] - low[2]
    centres = ((low + high) / 2 + to_spots)[:, None] + np.array([0.0, 0.0, 1.0]) * np.array(LOWERED)[:, None]
    count = len(spots) * len(LOWERED)
    swept = Boxes(
        centres=centres.reshape(-1, 3),
        axes=np.tile(np.eye(3), (count, 1, 1)),
        half_sizes=np.tile((high - low) / 2, (count, 1)),
    )
    obstacles = within(obstacles, place.position, float(np.linalg.norm(high - low)) + WAY_MARGIN)
    deep = overlap(swept, obstacles).max(axis=1, initial=-np.inf).reshape(len(spots), -1).max(axis=1)
    away = np.linalg.norm(spots - place.position, axis=1)
    return np.asarray(spots[int(np.argmin(np.maximum(deep, 0.0) / SPOT_DEPTH + away))])


def bottom_of(body: Body) -> float:
    return extent(shape_of(body), Z)[0]


def top_of(body: Body) -> float:
    return extent(shape_of(body), Z)[1]


def support_under(obstacles: Boxes, item: Boxes, way: Vector, highest: float = np.inf) -> float:
    """Height of what the item, moved by `way` [3], would come to stand on; -inf if nothing is there up to `highest`."""
    bottom = extent(item, Z)[0]
    feet = select(item, bottoms(item) < bottom + FOOT)
    corners = [np.linspace(*extent(feet, axis), FEET) for axis in np.eye(3)[:2]]
    points = np.array([[x, y, 0.0] for x in corners[0] for y in corners[1]]) + np.append(way[:2], 0.0)
    enter, leave = crossings(obstacles, points, Z)
    return float(leave[(leave > enter) & (leave <= highest)].max(initial=-np.inf))


class Heights(NamedTuple):
    """Tops of obstacles on a way, -inf where there are none."""

    highest: float
    passed: float
    """Of those that the mover does not end above."""
    ahead: float
    """Of these, those that it comes nearer to."""


def heights_on_the_way(obstacles: Boxes, mover: Boxes, way: Vector) -> Heights:
    """Of what `mover` passes above on its straight way [3]. What it only moves away from counts while it is above it.

    If that counted with its margin, an object beside its place would have to rise before it may go there, and the
    actions on both sides of the margin would be opposite ones: a clone that learns their mean stops between them.
    """
    low, high = np.array([extent(mover, axis) for axis in np.eye(3)]).T
    half = (high - low) / 2 + WAY_MARGIN
    half[2] = ANY_HEIGHT
    count = 2 + int(np.linalg.norm(way) / WAY_STEP)
    points = (low + high) / 2 + np.linspace(0.0, 1.0, count)[:, None] * way
    columns = Boxes(centres=points, axes=np.tile(np.eye(3), (count, 1, 1)), half_sizes=np.tile(half, (count, 1)))
    middle = (points[0] + points[-1]) / 2
    obstacles = within(obstacles, middle, float(np.linalg.norm(way) / 2 + np.hypot(half[0], half[1])), level=True)
    deep = overlap(columns, obstacles)
    hit, height = deep > 0, tops(obstacles)
    nearer = deep.max(axis=0) > np.maximum(deep[0], 0.0) + NEARER
    counted = nearer | (deep[0] > WAY_MARGIN) | hit[-1]
    return Heights(
        highest=float(height[counted].max(initial=-np.inf)),
        passed=float(height[counted & ~hit[-1]].max(initial=-np.inf)),
        ahead=float(height[nearer & ~hit[-1]].max(initial=-np.inf)),
    )


def way_out(obstacles: Boxes, item: Boxes, palm: Boxes) -> Vector | None:
    """The horizontal unit vector [3] of the shortest way out from under what hangs over a held item or over the hand.

    None if nothing does.
    """
    low, high = np.array([extent(join([item, palm]), axis) for axis in np.eye(3)]).T
    low, high = low - WAY_MARGIN, high + WAY_MARGIN
    above = select(obstacles, bottoms(obstacles) > extent(item, Z)[1])
    bounds = [ranges(above, axis) for axis in np.eye(3)[:2]]
    over = np.all([(start < high[i]) & (end > low[i]) for i, (start, end) in enumerate(bounds)], axis=0)
    if not over.any():
        return None
    ahead = [float(end[over].max() - low[i]) for i, (_, end) in enumerate(bounds)]
    back = [float(high[i] - start[over].min()) for i, (start, _) in enumerate(bounds)]
    ways = np.concatenate([np.eye(3)[:2], -np.eye(3)[:2]])
    return np.asarray(ways[int(np.argmin(ahead + back))])


def surface_of(body: Body) -> float:
    """Height of the body's surface at its centre, or its top where there is no surface."""
    enter, leave = crossings(shape_of(body), body.position[None], Z)
    through = leave[leave > enter]
    return float(body.position[2] + through.max()) if len(through) else top_of(body)
