"""Whether a task is solved: LIBERO's own predicates, evaluated only when they could hold.

They look up every contact by name in Python, which costs a good part of a control step. Positions are cheap to read,
and they rule out nearly every step: an object that is not above its target is not on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mujoco
import numpy as np

Check = Callable[[], bool]

ON_DISTANCE = 0.03
"""Horizontal distance in metres between two objects' centres within which LIBERO's On can hold."""


class Goal:
    """The goal of one LIBERO problem in one of its simulations."""

    def __init__(self, domain: Any, data: mujoco.MjData) -> None:
        self._domain = domain
        checks = [_necessary(domain, data, predicate) for predicate in domain.parsed_problem["goal_state"]]
        self._necessary = [check for check in checks if check is not None]

    def holds(self) -> bool:
        """LIBERO's objects must refer to this simulation's MjData."""
        return all(check() for check in self._necessary) and bool(self._domain._check_success())


def _necessary(domain: Any, data: mujoco.MjData, predicate: Sequence[str]) -> Check | None:
    """A cheap necessary condition of `predicate`; None where there is none."""
    match predicate:
        case ["on", item, place] if place in domain.object_sites_dict:
            return _over_site(domain, data, item, place)
        case ["on", item, place]:
            return _over_object(domain, data, item, place)
        case ["in", item, place] if place in domain.object_sites_dict:
            return _inside_site(domain, data, item, place)
    return None


def _over_object(domain: Any, data: mujoco.MjData, item: str, place: str) -> Check:
    above, below = data.xpos[domain.obj_body_id[item]], data.xpos[domain.obj_body_id[place]]
    return lambda: bool(below[2] <= above[2] and np.hypot(*(above - below)[:2]) < ON_DISTANCE)


def _over_site(domain: Any, data: mujoco.MjData, item: str, place: str) -> Check | None:
    region = domain.object_sites_dict[place]
    if not hasattr(region, "under"):
        return None
    site, body = domain.sim.model.site_name2id(place), domain.obj_body_id[item]
    site_position, site_rotation, position = data.site_xpos[site], data.site_xmat[site].reshape(3, 3), data.xpos[body]
    return lambda: bool(region.under(site_position, site_rotation, position))


def _inside_site(domain: Any, data: mujoco.MjData, item: str, place: str) -> Check:
    region = domain.object_sites_dict[place]
    site, body = domain.sim.model.site_name2id(place), domain.obj_body_id[item]
    site_position, site_rotation, position = data.site_xpos[site], data.site_xmat[site].reshape(3, 3), data.xpos[body]
    return lambda: bool(region.in_box(site_position, site_rotation, position))
