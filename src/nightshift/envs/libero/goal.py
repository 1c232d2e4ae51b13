"""Whether tasks are solved and physics is stable, for many simulations by one compiled call. Import it after `prepare`.

LIBERO's own predicates decide, but only where a necessary condition of each of them holds: they look up every contact
by name in Python, which costs a good part of a control step. Positions are cheap to read, and they rule out nearly
every step: an object that is not above its target is not on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import mujoco
import numba
import numpy as np
from numpy.typing import NDArray

from nightshift.envs.libero.articulation import predicate_ranges
from nightshift.envs.libero.observations import Field
from nightshift.envs.libero.osc import array_at, counts_at

Vector = NDArray[np.float64]

ON_DISTANCE = 0.03
"""Horizontal distance in metres between two objects' centres within which LIBERO's On can hold."""
UP_HEIGHT = 1.0
BELOW_TOP, ABOVE_TOP = 0.005, 0.10
"""Metres around the top of a region between which LIBERO's On can hold."""
BELOW_BOTTOM = 0.01
"""Metres below a region in which LIBERO's In can hold."""
SLACK = 1e-9
"""Conditions are wider by this than LIBERO's predicates, which round differently."""
_BROKEN = (
    int(mujoco.mjtWarning.mjWARN_BADQPOS),
    int(mujoco.mjtWarning.mjWARN_BADQVEL),
    int(mujoco.mjtWarning.mjWARN_BADQACC),
)
_WARNINGS = int(mujoco.mjtWarning.mjNWARNING)
_STRIDE = 2
"""int32 numbers in MuJoCo's record of one kind of warning: information on the last one, and their number."""


class Kind(IntEnum):
    """Necessary conditions, each on an item (a body or a joint) and a place (a body or a site)."""

    OVER_BODY = 0
    OVER_SITE = 1
    INSIDE_SITE = 2
    UP = 3
    JOINT_BETWEEN = 4


class Condition(NamedTuple):
    kind: Kind
    item: int
    place: int = 0
    bounds: tuple[float, float, float] = (0.0, 0.0, 0.0)  # half sizes of a site; lowest and highest joint position


class Goal:
    """The goal of one built LIBERO problem, for all of its simulations."""

    def __init__(self, domain: Any) -> None:
        model: mujoco.MjModel = domain.sim.model._model
        found = [necessary(domain, predicate) for predicate in domain.parsed_problem["goal_state"]]
        conditions = [condition for condition in found if condition is not None]
        self.constants = (
            np.array([model.nq, model.nsite, model.nbody]),
            np.array([one[:3] for one in conditions], np.int64).reshape(-1, 3),
            np.array([one.bounds for one in conditions], np.float64).reshape(-1, 3),
        )
        """Arguments of `judge`."""


def at_places(domain: Any) -> list[Condition]:
    """Those of a goal that want an object in or on a region."""
    found = [necessary(domain, predicate) for predicate in domain.parsed_problem["goal_state"]]
    return [one for one in found if one is not None and one.kind in {Kind.OVER_SITE, Kind.INSIDE_SITE}]


def is_at_place(condition: Condition, item: Vector, site: Vector, rotation: Vector) -> bool:
    """Whether one of these may hold with its item and its site at these positions [3]; `rotation` [9]: of the site."""
    half = np.array(condition.bounds)
    return bool(_is_at_site(condition.kind == Kind.OVER_SITE, item, site, rotation, half))


def necessary(domain: Any, predicate: Sequence[str]) -> Condition | None:
    """A cheap necessary condition of `predicate`; None where there is none."""
    bodies = domain.obj_body_id
    match predicate:
        case ["on", item, place] if place in domain.object_sites_dict:
            return _at_site(domain, Kind.OVER_SITE, item, place)
        case ["on", item, place]:
            return Condition(Kind.OVER_BODY, bodies[item], bodies[place])
        case ["in", item, place] if place in domain.object_sites_dict:
            return _at_site(domain, Kind.INSIDE_SITE, item, place)
        case ["up", item] if item in bodies:
            return Condition(Kind.UP, bodies[item])
        case [("open" | "close" | "turnon" | "turnoff") as name, item]:
            return _joint(domain, name, item)
    return None


def _at_site(domain: Any, kind: Kind, item: str, place: str) -> Condition | None:
    from libero.libero.envs.objects.site_object import SiteObject

    region = domain.object_sites_dict[place]
    test = "under" if kind == Kind.OVER_SITE else "in_box"
    if getattr(type(region), test, None) is not getattr(SiteObject, test):
        return None
    width, depth, height = map(float, region.size)
    site = domain.sim.model.site_name2id(place)
    return Condition(kind, domain.obj_body_id[item], site, (width, depth, height))


def _joint(domain: Any, predicate: str, item: str) -> Condition | None:
    """The range of the one joint of `item` in which LIBERO's test can hold."""
    site = domain.object_sites_dict.get(item)
    joints: Sequence[str] = (domain.get_object(item) if site is None else site).joints or ()
    bounds = predicate_ranges(domain, item).get(predicate)
    if len(joints) != 1 or bounds is None:
        return None
    address = domain.sim.model.get_joint_qpos_addr(joints[0])
    return Condition(Kind.JOINT_BETWEEN, int(address), bounds=(*bounds, 0.0))


@numba.njit(cache=True, nogil=True)
def judge(addresses, lanes, sizes, conditions, bounds, possible, unstable):  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    """Whether LIBERO's predicates may hold, and whether the physics is unstable, in the simulations at `addresses`
    [N, fields] (as of `Observer`), into the rows `lanes` [N]."""
    nq, sites, bodies = sizes
    for index in range(len(addresses)):
        row, lane = addresses[index], lanes[index]
        warnings = counts_at(row[Field.WARNINGS], _STRIDE * _WARNINGS)
        broken = False
        for kind in _BROKEN:
            broken = broken or warnings[_STRIDE * kind] > 0
        holds = not broken
        qpos = array_at(row[Field.QPOS], nq)
        site_positions = array_at(row[Field.SITE_POSITIONS], (sites, 3))
        site_rotations = array_at(row[Field.SITE_ROTATIONS], (sites, 9))
        positions = array_at(row[Field.BODY_POSITIONS], (bodies, 3))
        for g in range(len(conditions)):
            kind, item, place = conditions[g]
            if not holds:
                break
            if kind == Kind.JOINT_BETWEEN:
                holds = bounds[g, 0] - SLACK <= qpos[item] <= bounds[g, 1] + SLACK
            elif kind == Kind.UP:
                holds = positions[item, 2] >= UP_HEIGHT - SLACK
            elif kind == Kind.OVER_BODY:
                holds = _is_over(positions[item], positions[place])
            else:
                over = kind == Kind.OVER_SITE
                holds = _is_at_site(over, positions[item], site_positions[place], site_rotations[place], bounds[g])
        unstable[lane] = broken
        possible[lane] = holds


@numba.njit(cache=True, nogil=True)
def _is_over(above, below):  # type: ignore[no-untyped-def]
    x, y = above[0] - below[0], above[1] - below[1]
    return below[2] <= above[2] + SLACK and np.sqrt(x * x + y * y) < ON_DISTANCE + SLACK


@numba.njit(cache=True, nogil=True)
def _is_at_site(over, item, site, rotation, half):  # type: ignore[no-untyped-def]
    """As LIBERO's SiteObject: `under` in the axes of the region, `in_box` in those of the world."""
    for i in range(3):
        offset = extent = 0.0
        for k in range(3):
            offset += rotation[3 * i + k] * (item[k] - site[k])
            extent += rotation[3 * i + k] * half[k]
        if over:
            low = half[2] - BELOW_TOP if i == 2 else -half[i]  # noqa: PLR2004
            high = half[2] + ABOVE_TOP if i == 2 else half[i]  # noqa: PLR2004
        else:
            offset, extent = item[i] - site[i], abs(extent)
            low, high = (-extent - BELOW_BOTTOM if i == 2 else -extent), extent  # noqa: PLR2004
        if not low - SLACK < offset < high + SLACK:
            return False
    return True
