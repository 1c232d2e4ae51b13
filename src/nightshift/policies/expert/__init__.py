"""The scripted expert: a proportional controller in operational space, a function of the scene alone.

It has no memory. Which phase it is in (go above, descend, close, lift, carry, lower, let go) follows from where
the gripper and the objects are, so a memoryless policy can imitate it. What to do follows from the BDDL goal:

    (up A)             grasp A and raise it
    (on A B), (in A B) grasp A, carry it over B, lower it, let go; push A if it is wider than the gripper opens, drag it
                       if it is flat; open B first if that is a drawer or a door, and before that slide A out of the way
    (reach A)          move to A: the goal of the fake suite
    (open R), (close R), (turnon R), (turnoff R)
                       move R's joint to where that holds: push a face of what it moves, or hold its handle and pull

Of several goals it works on the first that does not hold yet, and closes last (`goals`). Where to grasp follows from
the objects' collision shapes (`grasp`, `hold`), how high to carry from the obstacles on the way (`place`). All
constants in this package describe the robot (its gripper, its controller), none a task or an object.
"""

from __future__ import annotations

from nightshift.policies.expert import aside, goals, joints, leaving, skills
from nightshift.types import Array, Scene

__all__ = ["Expert"]


class Expert:
    """Acts from privileged state.

    Example: action = Expert().act(env.scene())
    """

    def act(self, scene: Scene) -> Array:
        """An action [7] in [-1, 1]."""
        goal, reached = goals.current(scene)
        if not goals.is_published(scene) and leaving.is_closed_on_nothing(scene, goal):
            return leaving.open_fingers(scene)
        for before in reached:
            if leaving.is_needed(scene, before, goal):
                return leaving.leave(scene, before)
        return _work_on(scene, goal)


def _work_on(scene: Scene, goal: goals.Goal) -> Array:
    predicate, *names = goal
    match predicate:
        case "reach":
            return skills.reach(scene, names[0])
        case "up":
            return skills.pick_up(scene, names[0])
        case "on" | "in":
            return skills.bring(scene, names[0], goals.spot_for(scene, goal))
        case "aside":
            return skills.slide(scene, names[0], aside.way_aside(scene, names[0], scene.joints[names[1]]))
        case "open" if skills.handles(scene):
            return skills.pull(scene, names[0])
        case "open" | "close" | "turnon" | "turnoff" if names[0] in scene.joints:
            return joints.bring_to(scene, scene.joints[names[0]], predicate)
    raise ValueError(f"the expert cannot do {' '.join(goal)!r}; it knows on, in, up, reach and joints that move")
