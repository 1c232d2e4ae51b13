"""The scripted expert: a proportional controller in operational space, a function of the scene alone.

It has no memory. Which phase it is in (go above, descend, close, lift, carry, lower, let go) follows from where
the gripper and the objects are, so a memoryless policy can imitate it. What to do follows from the BDDL goal:

    (up A)            grasp A and raise it
    (on A B), (in A B) grasp A, carry it over B, lower it, let go; push A if it is wider than the gripper opens
    (reach A)         move to A: the goal of the fake suite
    (open R)          grasp the handle that belongs to region R and pull it away from R

Of several goals it works on the first that does not hold yet. Where to grasp follows from the objects' collision
shapes (`grasp`), how high to carry from the obstacles on the way (`place`). All constants in this package describe the
robot (its gripper, its controller), none a task or an object.
"""

from __future__ import annotations

from nightshift.policies.expert import skills
from nightshift.policies.expert.grasp import is_held
from nightshift.policies.expert.place import Place
from nightshift.types import Array, Scene

__all__ = ["Expert"]


class Expert:
    """Acts from privileged state.

    Example: action = Expert().act(env.scene())
    """

    def act(self, scene: Scene) -> Array:
        """An action [7] in [-1, 1]."""
        goal = _next_goal(scene)
        predicate, *names = goal
        match predicate:
            case "reach":
                return skills.reach(scene, names[0])
            case "open":
                return skills.pull(scene, names[0])
            case "up":
                return skills.pick_up(scene, names[0])
            case "on" | "in":
                return skills.bring(scene, names[0], Place.of(scene.bodies[names[1]], predicate))
        raise ValueError(f"the expert cannot do {' '.join(goal)!r}; it knows on, in, up, open and reach")


def _next_goal(scene: Scene) -> tuple[str, ...]:
    *before, last = scene.goal
    return next((goal for goal in before if not _is_reached(scene, *goal)), last)


def _is_reached(scene: Scene, predicate: str, *names: str) -> bool:
    if predicate not in ("on", "in"):
        return False
    item = scene.bodies[names[0]]
    return Place.of(scene.bodies[names[1]], predicate).holds(item) and not is_held(scene, item)
