"""The objects of libero_mini, registered with LIBERO under their class names (MiniCube -> mini_cube).

Importing this module needs `prepare` to have run. All collision shapes are boxes and cylinders.
"""

from __future__ import annotations

import math
from typing import Any

from libero.libero.envs.base_object import register_object
from robosuite.models.objects import BoxObject, CylinderObject, MujocoXMLObject

from nightshift.envs.mini.suite import ASSETS

OPEN_FROM = 0.10
"""Metres a drawer has to be pulled out to count as open."""


def _yaw_within(limit: float) -> dict[str, Any]:
    """Attributes for LIBERO's table sampler that turn an object about the vertical by up to `limit` radians.

    The sampler writes its quaternion as (x, y, z, w) where MuJoCo reads (w, x, y, z): about "x" by pi - yaw is
    about the vertical by yaw. LIBERO's own objects rely on that too.
    """
    return {"rotation": (math.pi - limit, math.pi + limit), "rotation_axis": "x"}


def _describe(model: Any, category: str, yaw: float) -> None:
    model.category_name = category
    model.object_properties = {"vis_site_names": {}}
    for name, value in _yaw_within(yaw).items():
        setattr(model, name, value)


class _Box(BoxObject):  # type: ignore[misc]  # robosuite is untyped
    def __init__(self, name: str, category: str, size: list[float], rgba: list[float], yaw: float) -> None:
        super().__init__(name=name, size=size, rgba=rgba, density=400.0, friction=[1.0, 0.005, 0.0001])
        _describe(self, category, yaw)


@register_object
class MiniCube(_Box):
    def __init__(self, name: str = "cube") -> None:
        super().__init__(name, "mini_cube", [0.02, 0.02, 0.02], [0.85, 0.25, 0.2, 1], yaw=math.pi / 5)


@register_object
class MiniRedCube(_Box):
    def __init__(self, name: str = "red_cube") -> None:
        super().__init__(name, "mini_red_cube", [0.02, 0.02, 0.02], [0.85, 0.15, 0.15, 1], yaw=math.pi / 5)


@register_object
class MiniBlueCube(_Box):
    def __init__(self, name: str = "blue_cube") -> None:
        super().__init__(name, "mini_blue_cube", [0.025, 0.025, 0.025], [0.15, 0.3, 0.85, 1], yaw=math.pi / 5)


@register_object
class MiniBlock(_Box):
    """Wider than the gripper opens, so it has to be pushed."""

    def __init__(self, name: str = "block") -> None:
        super().__init__(name, "mini_block", [0.05, 0.05, 0.02], [0.95, 0.7, 0.2, 1], yaw=math.pi / 10)


class _Cylinder(CylinderObject):  # type: ignore[misc]  # robosuite is untyped
    def __init__(self, name: str, category: str, size: list[float], rgba: list[float]) -> None:
        super().__init__(name=name, size=size, rgba=rgba, density=300.0, solref=[0.02, 1.0])
        _describe(self, category, yaw=0.0)


@register_object
class MiniCan(_Cylinder):
    def __init__(self, name: str = "can") -> None:
        super().__init__(name, "mini_can", [0.025, 0.045], [0.2, 0.6, 0.3, 1])


class _FromXml(MujocoXMLObject):  # type: ignore[misc]  # robosuite is untyped
    def __init__(self, name: str, category: str, *, yaw: float, draw_collisions: bool = True) -> None:
        joints = [{"type": "free", "damping": "0.0005"}]
        path = str(ASSETS / "objects" / f"{category.removeprefix('mini_')}.xml")
        super().__init__(path, name=name, joints=joints, duplicate_collision_geoms=draw_collisions)
        _describe(self, category, yaw)


@register_object
class MiniPlate(_FromXml):
    """Drawn as a disc but collides as a box: MuJoCo lets a flat cylinder sink into the table."""

    def __init__(self, name: str = "plate") -> None:
        super().__init__(name, "mini_plate", yaw=0.0, draw_collisions=False)


@register_object
class MiniTray(_FromXml):
    """A shallow box with an `inside` region. LIBERO's In predicate holds for unturned regions only, so no yaw."""

    def __init__(self, name: str = "tray") -> None:
        super().__init__(name, "mini_tray", yaw=0.0)


@register_object
class MiniCabinet(_FromXml):
    """A heavy cabinet with one drawer on a slide joint and a bar handle, standing free on the table."""

    def __init__(self, name: str = "cabinet") -> None:
        super().__init__(name, "mini_cabinet", yaw=math.pi / 12)
        self.object_properties["articulation"] = {
            "default_open_ranges": [OPEN_FROM, 0.14],
            "default_close_ranges": [0.0, 0.015],
        }

    def is_open(self, qpos: float) -> bool:
        return bool(qpos > OPEN_FROM)

    def is_close(self, qpos: float) -> bool:
        return bool(qpos < max(self.object_properties["articulation"]["default_close_ranges"]))
