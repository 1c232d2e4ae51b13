"""The slides and hinges of a built LIBERO problem, and where its predicates about them hold."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import mujoco
import numpy as np

JOINT_TESTS = {"open": "is_open", "close": "is_close", "turnon": "turn_on", "turnoff": "turn_off"}
"""LIBERO's test of a joint position, by the predicate it decides."""


@dataclass(frozen=True, kw_only=True)
class Articulation:
    """What of a joint does not change while it moves."""

    kind: Literal["slide", "hinge"]
    index: int
    address: int  # in qpos
    body: int  # that it moves
    limits: tuple[float, float]
    holds: dict[str, tuple[float, float]]  # between which positions a predicate holds


def articulations(domain: Any, model: mujoco.MjModel) -> dict[str, Articulation]:
    """The first slide or hinge of each object, fixture and region, by BDDL name."""
    found = {}
    for group in (domain.objects_dict, domain.fixtures_dict, domain.object_sites_dict):
        for name, entity in group.items():
            joints = [model.joint(joint) for joint in entity.joints or ()]
            moving = [joint for joint in joints if joint.type[0] != mujoco.mjtJoint.mjJNT_FREE]
            if moving:
                found[name] = _articulation(model, int(moving[0].id), predicate_ranges(domain, name))
    return found


def _articulation(model: mujoco.MjModel, index: int, holds: dict[str, tuple[float, float]]) -> Articulation:
    low, high = model.jnt_range[index]
    return Articulation(
        kind="slide" if model.jnt_type[index] == mujoco.mjtJoint.mjJNT_SLIDE else "hinge",
        index=index,
        address=int(model.jnt_qposadr[index]),
        body=int(model.jnt_bodyid[index]),
        limits=(float(low), float(high)),
        holds=holds,
    )


def predicate_ranges(domain: Any, name: str) -> dict[str, tuple[float, float]]:
    """Between which joint positions each of LIBERO's predicates about `name` can hold."""
    state = domain.object_states_dict[name]
    articulated = domain.get_object(state.parent_name if name in domain.object_sites_dict else name)
    ranges = articulated.object_properties.get("articulation", {})
    limits = [limit for bounds in ranges.values() for limit in bounds]
    tests = {predicate: getattr(articulated, test, None) for predicate, test in JOINT_TESTS.items()}
    found = {}
    for predicate, test in tests.items():
        if test is not None and limits:
            with contextlib.suppress(NotImplementedError):  # what LIBERO's base class has for a knob that cannot open
                found[predicate] = range_where(test, limits)
    return found


def range_where(test: Callable[[float], bool], limits: Sequence[float]) -> tuple[float, float]:
    """The smallest range that contains all positions where `test` holds, if it changes at `limits` alone."""
    inner = sorted(set(limits))
    edges = [-np.inf, *inner, np.inf]
    inside = [inner[0] - 1.0, *((low + high) / 2 for low, high in pairwise(inner)), inner[-1] + 1.0]
    holds = [test(position) for position in inside]
    pieces = [piece for piece, here in zip(pairwise(edges), holds, strict=True) if here]
    found = [*pieces, *((limit, limit) for limit in limits if test(limit))]
    return min((low for low, _ in found), default=np.inf), max((high for _, high in found), default=-np.inf)
