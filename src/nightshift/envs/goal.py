"""Whether a task is done: LIBERO's own predicates, asked only when they could hold.

They walk through every contact by name in Python, which costs a good part of a control step. Where things are is
cheap to see, and a conjunct that needs an object to be somewhere fails there on nearly every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mujoco
import numpy as np

Need = Callable[[], bool]

ON_DISTANCE = 0.03
"""Metres between the middles of two objects, seen from above, within which LIBERO calls one on the other."""


class Goal:
    """The goal of one LIBERO problem, seen in one of its simulations."""

    def __init__(self, domain: Any, data: mujoco.MjData) -> None:
        self._domain = domain
        needs = [_need(domain, data, predicate) for predicate in domain.parsed_problem["goal_state"]]
        self._needs = [need for need in needs if need is not None]

    def holds(self) -> bool:
        """LIBERO's objects must be looking at this simulation."""
        return all(need() for need in self._needs) and bool(self._domain._check_success())


def _need(domain: Any, data: mujoco.MjData, predicate: Sequence[str]) -> Need | None:
    """Something cheap that holds whenever `predicate` does; None where nothing is cheaper than to ask."""
    match predicate:
        case ["on", item, place] if place in domain.object_sites_dict:
            return _over_site(domain, data, item, place)
        case ["on", item, place]:
            return _over_object(domain, data, item, place)
        case ["in", item, place] if place in domain.object_sites_dict:
            return _inside_site(domain, data, item, place)
    return None


def _over_object(domain: Any, data: mujoco.MjData, item: str, place: str) -> Need:
    above, below = data.xpos[domain.obj_body_id[item]], data.xpos[domain.obj_body_id[place]]
    return lambda: bool(below[2] <= above[2] and np.hypot(*(above - below)[:2]) < ON_DISTANCE)


def _over_site(domain: Any, data: mujoco.MjData, item: str, place: str) -> Need | None:
    region = domain.object_sites_dict[place]
    if not hasattr(region, "under"):
        return None
    site, body = domain.sim.model.site_name2id(place), domain.obj_body_id[item]
    where, turned, what = data.site_xpos[site], data.site_xmat[site].reshape(3, 3), data.xpos[body]
    return lambda: bool(region.under(where, turned, what))


def _inside_site(domain: Any, data: mujoco.MjData, item: str, place: str) -> Need:
    region = domain.object_sites_dict[place]
    site, body = domain.sim.model.site_name2id(place), domain.obj_body_id[item]
    where, turned, what = data.site_xpos[site], data.site_xmat[site].reshape(3, 3), data.xpos[body]
    return lambda: bool(region.in_box(where, turned, what))
