"""Which goal to work on now: the first of the task's goals that does not hold, after what it needs.

What is to be closed comes last, what is to be put in comes after opening that, and what is below comes before what is
put on it. All of it is read from the scene, so an interrupted episode goes on where it is.
"""

from __future__ import annotations

from dataclasses import replace

from nightshift.policies.expert import aside, joints
from nightshift.policies.expert.grasp import is_held, neighbours
from nightshift.policies.expert.place import Place, free_spot
from nightshift.policies.expert.skills import is_placed
from nightshift.types import Scene

Goal = tuple[str, ...]


def in_order(scene: Scene) -> list[Goal]:
    """The task's goals in the order in which to reach them, with what they need.

    An object that something is put on goes to its own place before.
    """
    ordered: list[Goal] = []
    for goal in sorted(scene.goal, key=lambda goal: (goal[0] == "close", _below(scene, goal))):
        ordered += [*_needs(scene, goal), goal]
    return ordered


def _below(scene: Scene, goal: Goal) -> int:
    """How many objects with a goal of their own are to be below the goal's object; regions of objects do not count."""
    below = [other for other in scene.goal if other[0] in ("on", "in") and other[1] == goal[-1] and other != goal]
    return sum(1 + _below(scene, other) for other in below) if goal[0] in ("on", "in") else 0


def is_published(scene: Scene) -> bool:
    """Whether it is a task of the kind that demos were published of: one object, onto another one or into a container.

    There fingers that have closed on nothing are opened by the next grasp alone, so that most demos come out again.
    """
    [*before, (predicate, *names)] = scene.goal
    target = scene.bodies.get(names[-1])
    is_surface = predicate == "on" and target is not None and target.boxes is None
    return not before and names[-1] not in scene.joints and not is_surface


def current(scene: Scene) -> tuple[Goal, list[Goal]]:
    """The goal to work on, and those before it, which hold."""
    ordered = in_order(scene)
    number = next((i for i, goal in enumerate(ordered[:-1]) if not is_reached(scene, goal)), len(ordered) - 1)
    return ordered[number], ordered[:number]


def is_reached(scene: Scene, goal: Goal) -> bool:
    predicate, name, *places = goal
    if predicate == "aside":
        return not is_held(scene, name) and not aside.is_needed(scene, name, scene.joints[places[0]])
    if predicate in ("on", "in"):
        return is_placed(scene, name, place_of(scene, goal)) and not is_held(scene, name)
    return name in scene.joints and joints.is_at(scene.joints[name], predicate)


def place_of(scene: Scene, goal: Goal) -> Place:
    predicate, _, target = goal
    sharing = [other for other in scene.goal if other[0] == predicate and other[-1] == target]
    items = [scene.bodies[name] for _, name, _ in sharing]
    return Place.of(scene.bodies[target], predicate, items, sharing.index(goal))


def spot_for(scene: Scene, goal: Goal) -> Place:
    """The place of a goal, in a drawer where nothing is in the way."""
    place, (_, name, target) = place_of(scene, goal), goal
    if target not in scene.joints:
        return place
    return replace(place, crowded=True, position=free_spot(place, scene.bodies[name], neighbours(scene, name)))


def _needs(scene: Scene, goal: Goal) -> list[Goal]:
    """To put something in, its drawer or door must be open; once it is held or there, it need not be any more.

    Before a drawer is opened, what goes into it must not stand in its way.
    """
    predicate, name, *places = goal
    if predicate != "in":
        return []
    door = next((one for one in (places[0], *_owners(scene, places[0])) if "open" in _ranges(scene, one)), None)
    if door is None or is_reached(scene, goal):
        return []
    if scene.joints[door].kind == "slide" and not joints.is_halfway(scene.joints[door], "open"):
        return [("aside", name, door), ("open", door)]
    return [] if is_held(scene, name) else [("open", door)]


def _owners(scene: Scene, region: str) -> list[str]:
    """What the region belongs to: its name begins with it."""
    return [name for name in scene.joints if region.startswith(f"{name}_")]


def _ranges(scene: Scene, name: str) -> frozenset[str]:
    return frozenset(scene.joints[name].holds) if name in scene.joints else frozenset()
