"""World: the collision shapes that the expert looks at."""

from __future__ import annotations

import mujoco
import numpy as np

from nightshift.envs.libero.articulation import articulations
from nightshift.envs.libero.env import LiberoEnv
from nightshift.envs.mini.suite import LIBERO_MINI
from nightshift.types import Body

STACK, DRAWER = "stack_red_on_blue", "open_drawer"


def env_of(name: str) -> LiberoEnv:
    env = LIBERO_MINI.make_env(next(task for task in LIBERO_MINI.tasks() if task.name == name))
    env.reset("eval", 0)
    return env


def reach(body: Body) -> float:
    """The furthest corner of its boxes from its position."""
    assert body.boxes is not None
    return float(
        (
            np.linalg.norm(body.boxes.centres - body.position, axis=1) + np.linalg.norm(body.boxes.half_sizes, axis=1)
        ).max()
    )


def test_objects_have_the_boxes_they_collide_with_and_regions_have_none() -> None:
    scene = env_of(STACK).scene()
    for name, body in scene.bodies.items():
        if name.startswith("main_table"):
            assert body.boxes is None
        else:
            assert reach(body) <= np.linalg.norm(body.half_size) + 1e-6


def test_boxes_move_with_the_part_they_belong_to() -> None:
    env = env_of(DRAWER)
    before = env.scene()
    [(cabinet, boxes)] = [(name, body.boxes) for name, body in before.bodies.items() if body.boxes is not None]
    env._data.qpos[articulations(env._domain, env._model)[before.goal[0][1]].address] -= 0.05
    mujoco.mj_forward(env._model, env._data)
    after = env.scene().bodies[cabinet].boxes
    assert after is not None
    moved = np.linalg.norm(after.centres - boxes.centres, axis=1)
    assert np.isclose(moved.max(), 0.05)
    assert moved.min() == 0.0


def test_a_scene_knows_where_the_arm_stands() -> None:
    position = env_of(STACK).scene().robot_position
    assert position is not None
    assert position[0] < -0.3
