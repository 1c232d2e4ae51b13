"""What perturbations can change of one LIBERO simulation: a MuJoCo model of its own, and its init state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import mujoco
import numpy as np
from numpy.typing import NDArray

from nightshift.envs.libero.cameras import CAMERA_NAMES
from nightshift.envs.libero.culling import COLLISION_GROUP
from nightshift.envs.libero.goal import Condition, at_places, is_at_place
from nightshift.envs.libero.model_copies import ModelCopies

Vector = NDArray[np.float64]
Ids = NDArray[np.int64]

_RGB = int(mujoco.mjtTextureRole.mjTEXROLE_RGB)
_DEFAULT_COLOR = (0.5, 0.5, 0.5, 1.0)
"""Of a geom that leaves its colour to its material."""
_BOX, _CYLINDER, _CAPSULE = mujoco.mjtGeom.mjGEOM_BOX, mujoco.mjtGeom.mjGEOM_CYLINDER, mujoco.mjtGeom.mjGEOM_CAPSULE
SPARES = (
    (_BOX, (0.02, 0.03, 0.02)),
    (_CYLINDER, (0.02, 0.03, 0.0)),
    (_BOX, (0.015, 0.015, 0.04)),
    (_CAPSULE, (0.018, 0.02, 0.0)),
    (_CYLINDER, (0.03, 0.012, 0.0)),
)
"""Shapes and sizes of the objects that can be added, in metres."""
SPARE_GAP = 0.06
"""Metres between an added object and anything else."""
SPARE_REACH = 0.1, 0.4
"""Metres from the middle of the objects within which one is added: at first and at last."""
SPARE_ATTEMPTS = 400
SPARE_HEADROOM = 0.25
"""Metres above the table that have to be empty."""
SAME_HEIGHT = 0.005
"""Metres between two surfaces that count as one."""
ON_TABLE = 0.03
"""An object stands on the table if what is below it is at most so many metres higher than the lowest of those."""
STACKED = 0.06
"""An object above another one stands on it if they are horizontally so near."""
STACK_ROOM = 0.05
"""Metres above where an object was, in which a place for it on a larger one is looked for."""
STACK_GAP = 1e-4
"""Metres between an object and the one that it is put on, at most."""
BEHIND = 1e-6
"""Metres below a surface from which the next one is looked for: less than the gap under an object that rests."""
GROWN_INTO = 0.001
"""Metres by which an object may reach further into another one than before it was resized."""
SUNK = 0.04
"""Metres that an object may reach into what it stands on: where LIBERO places it, and where it has settled."""
_SCALED = (
    *("body_pos", "body_ipos", "body_mass", "body_inertia", "site_pos", "jnt_pos"),
    *("geom_size", "geom_pos", "geom_aabb", "geom_rbound", "mesh_vert", "bvh_aabb"),
)
"""Arrays of a model that a resized object changes."""


class Furnished(NamedTuple):
    """A model with objects that are hidden until they are placed."""

    copies: ModelCopies
    spares: Ids
    """Their bodies."""


def furnish(domain: Any, model: mujoco.MjModel) -> Furnished:
    """Compile the problem again with `SPARES`. They have no joints, so init states fit; everything else keeps its id,
    since they come last."""
    spec = mujoco.MjSpec.from_string(domain.model.get_xml())
    for number, (shape, size) in enumerate(SPARES):
        body = spec.worldbody.add_body(name=f"spare_{number}", pos=[0, 0, 0])
        body.add_geom(name=f"spare_{number}", type=shape, size=size, group=1, rgba=[0, 0, 0, 0])
    made = spec.compile()
    for name in ("body_pos", "body_quat", "geom_rgba", "site_rgba"):  # what robosuite and LIBERO set after compiling
        values = getattr(model, name)
        getattr(made, name)[: len(values)] = values
    for name in ("center", "extent", "meansize", "meanmass", "meaninertia"):
        setattr(made.stat, name, getattr(model.stat, name))
    made.vis.global_.offwidth, made.vis.global_.offheight = model.vis.global_.offwidth, model.vis.global_.offheight
    spares = np.array([made.body(f"spare_{number}").id for number in range(len(SPARES))])
    _set_solid(made, spares, False)
    return Furnished(ModelCopies(made), spares)


def _set_solid(model: mujoco.MjModel, spares: Ids | int, solid: bool) -> None:
    """Whether anything collides with them. They are compiled as solid: MuJoCo makes the trees in which it looks for
    contacts for what collides, and for nothing else."""
    for mask in ("contype", "conaffinity"):
        getattr(model, f"body_{mask}")[spares] = solid
        getattr(model, f"geom_{mask}")[model.body_geomadr[spares]] = solid


class SceneModel:
    """The scene of one episode, for perturbations to change."""

    def __init__(self, domain: Any, furnished: Furnished, start: Vector) -> None:
        """`start`: the init state, as time, positions and velocities."""
        self.model = furnished.copies.take()
        self.start = start.copy()
        self.textures: set[int] = set()
        """Changed ones; `meshes` likewise."""
        self.meshes: set[int] = set()
        self._is_scaled = False
        self._spares = furnished.spares
        self._robot = domain.robots[0]
        self._entities = [int(body) for body in domain.obj_body_id.values()]
        self.objects: Mapping[str, int] = {
            name: int(body) for name, body in domain.obj_body_id.items() if self._is_free(int(body))
        }
        """The bodies of what can be moved, by BDDL name."""
        self._camera = self.model.camera(CAMERA_NAMES["agentview"]).id
        self._bodies_of: dict[int, list[int]] = {}
        """Of each root that was asked for; `_geoms_of` likewise. The tree stays as it is."""
        self._geoms_of: dict[int, list[int]] = {}
        self._bottoms: dict[int, float] = {}
        """Of each that was asked for since the last change."""
        self._goal_sites = self._sites_of_goal(domain)
        self._goal_places = at_places(domain)
        self._resized = self._without(self._goal_containers())
        self._data = mujoco.MjData(self.model)
        self._update()

    def finished(self) -> None:
        """Compute the model's constants that depend on what was changed."""
        if self._is_scaled:
            mujoco.mj_setConst(self.model, mujoco.MjData(self.model))

    def centre(self) -> Vector:
        """The middle of the objects."""
        return np.asarray(self._data.xpos[list(self.objects.values())].mean(axis=0))

    # --- camera and light ---

    def camera_pose(self) -> tuple[Vector, Vector]:
        """Position [3] and rotation [3, 3] of agentview in the world; it looks along -z."""
        return self._data.cam_xpos[self._camera].copy(), self._data.cam_xmat[self._camera].reshape(3, 3).copy()

    def set_camera_pose(self, position: Vector, rotation: Vector) -> None:
        body = self.model.cam_bodyid[self._camera]
        frame = self._data.xmat[body].reshape(3, 3)
        self.model.cam_pos[self._camera] = frame.T @ (position - self._data.xpos[body])
        mujoco.mju_mat2Quat(self.model.cam_quat[self._camera], (frame.T @ rotation).ravel())

    def scale_field_of_view(self, factor: float) -> None:
        self.model.cam_fovy[self._camera] *= factor

    def scale_lights(self, factors: Vector) -> None:
        """By colour channel, [3]."""
        for name in ("light_ambient", "light_diffuse", "light_specular"):
            getattr(self.model, name)[:] *= factors
        head = self.model.vis.headlight
        head.ambient, head.diffuse, head.specular = (
            values * factors for values in (head.ambient, head.diffuse, head.specular)
        )

    def turn_lights(self, rotation: Vector) -> None:
        """About the middle of the objects."""
        centre = self.centre()
        self.model.light_pos[:] = centre + (self.model.light_pos - centre) @ rotation.T
        self.model.light_dir[:] = self.model.light_dir @ rotation.T

    # --- surfaces ---

    def background_textures(self) -> list[int]:
        """Of what is neither robot nor object nor furniture, and of nothing else."""
        background = self._background_materials()
        found = {int(self.model.mat_texid[material, _RGB]) for material in background}
        others = set(self.model.geom_matid.tolist()) - set(background) - {-1}
        return sorted(found - {-1} - {int(self.model.mat_texid[material, _RGB]) for material in others})

    def plain_background_materials(self) -> list[int]:
        return [material for material in self._background_materials() if self.model.mat_texid[material, _RGB] < 0]

    def texture(self, texture: int) -> NDArray[np.uint8]:
        """Its pixels [H, W, C]; the six sides of a cube lie below each other."""
        shape = [int(of[texture]) for of in (self.model.tex_height, self.model.tex_width, self.model.tex_nchannel)]
        start = int(self.model.tex_adr[texture])
        return np.asarray(self.model.tex_data[start : start + int(np.prod(shape))]).reshape(shape)

    def set_texture(self, texture: int, pixels: NDArray[np.uint8]) -> None:
        start = int(self.model.tex_adr[texture])
        self.model.tex_data[start : start + pixels.size] = pixels.ravel()
        self.textures.add(texture)

    def blend_material(self, material: int, color: Vector, weight: float) -> None:
        before = self.model.mat_rgba[material, :3]
        self.model.mat_rgba[material, :3] = (1 - weight) * before + weight * color

    def _background_materials(self) -> list[int]:
        own = [body for body in range(1, self.model.nbody) if self._is_within(body, self._entities)]
        other = {*own, *self._robot_bodies(), *self._spares.tolist()}
        drawn = self.model.geom_group != COLLISION_GROUP
        is_other = np.isin(self.model.geom_bodyid, sorted(other))
        return sorted(
            set(self.model.geom_matid[drawn & ~is_other].tolist())
            - set(self.model.geom_matid[is_other].tolist())
            - {-1}
        )

    # --- objects ---

    def blend_object(self, name: str, color: Vector, weight: float) -> None:
        materials = set()
        for geom in self._geoms(self.objects[name]):
            material = int(self.model.geom_matid[geom])
            if material >= 0 and np.allclose(self.model.geom_rgba[geom], _DEFAULT_COLOR):
                materials.add(material)
            else:
                self.model.geom_rgba[geom, :3] = (1 - weight) * self.model.geom_rgba[geom, :3] + weight * color
        for material in sorted(materials):
            self.blend_material(material, color, weight)

    def scale_objects(self, factor: float) -> bool:
        """About their origins; they then stand where they stood, also on each other. False if there are none.

        Containers of the goal stay as they are: LIBERO judges by the size that their regions have in the XML, so in a
        container of another size success would mean something else.
        """
        bottoms = {body: self._bottom(body) for body in self._resized}
        stacked = self._stacked()
        for body in self._resized:
            self._scale(body, factor)
        self._scale_meshes(factor)
        for body in self._resized:
            height = self._qpos(body)[2]
            self._qpos(body)[2] = height + (factor - 1) * (height - bottoms[body])
        self._is_scaled = True
        self._update()
        if factor != 1:
            self._stack(stacked)
        return bool(self._resized)

    def can_scale_objects(self, factor: float) -> bool:
        """Whether none of that size reaches further into another one or into furniture, and whether all can still be
        where the goal wants them: LIBERO judges by the middle of an object, which is higher in a larger one."""
        with self._undone():
            self._settle()
            depths, fitting = self._depths(), self._fitting()
            self.scale_objects(factor)
            self._settle()
            grown = self._depths()
            is_apart = all(deep - depths.get(pair, 0.0) < GROWN_INTO for pair, deep in grown.items())
            return is_apart and self._fitting() == fitting

    @contextlib.contextmanager
    def _undone(self) -> Iterator[None]:
        """What is resized meanwhile is set back at the end."""
        start, meshes, is_scaled = self.start.copy(), self.meshes.copy(), self._is_scaled
        kept = {name: getattr(self.model, name).copy() for name in _SCALED}
        try:
            yield
        finally:
            for name, values in kept.items():
                getattr(self.model, name)[:] = values
            self.start[:], self.meshes, self._is_scaled = start, meshes, is_scaled
            self._update()

    def _depths(self) -> Mapping[tuple[int, int], float]:
        """How far objects, furniture and the robot reach into each other, by their bodies."""
        roots = np.zeros(self.model.nbody, np.int64)
        for root in (*self._entities, *self._spares.tolist()):
            roots[self._bodies(root)] = root
        robot = sorted(self._robot_bodies())
        roots[robot] = robot[0]
        contact = self._collided(self._positions).contact
        found: dict[tuple[int, int], float] = {}
        for pair, distance in zip(np.sort(roots[self.model.geom_bodyid[contact.geom]]), contact.dist, strict=True):
            one, other = pair.tolist()
            if one and one != other:
                found[one, other] = max(found.get((one, other), 0.0), -float(distance))
        return found

    def _fitting(self) -> list[Condition]:
        """The places of the goal in which the object that they are for can stand as it stands now."""
        return [condition for condition in self._goal_places if self._fits(condition)]

    def _fits(self, condition: Condition) -> bool:
        site, place = condition.place, self._qpos(condition.item)
        before = place.copy()
        self._put_at(condition.item, site)
        fits = is_at_place(condition, place, self._data.site_xpos[site], self._data.site_xmat[site])
        place[:] = before
        return fits

    def _put_at(self, body: int, site: int) -> None:
        """Put an object on the floor of a region, or on the rim around it."""
        middle, rotation = self._data.site_xpos[site], self._data.site_xmat[site].reshape(3, 3)
        holder = self._holder(int(self.model.site_bodyid[site]))
        others = {geom for root in self.objects.values() if root != holder for geom in self._geoms(root)}
        top = np.array([0.0, 0.0, np.abs(rotation[2]) @ self.model.site_size[site]])
        floor, _ = self._ground(middle + top, others)
        place = self._qpos(body)
        lowest = floor + float(place[2]) - self._bottom(body)
        place[:] = *middle[:2], lowest
        if holder is not None and self._reaches_into(body, holder):
            self._lift_out(body, holder, lowest, lowest + STACK_ROOM)

    def _holder(self, body: int) -> int | None:
        """The object or piece of furniture that a body is part of; None for the table."""
        return next((root for root in self._entities if self._is_within(body, [root])), None)

    def _stacked(self) -> list[tuple[int, int]]:
        """Objects that stand on another one, each with that one, from the lowest to the highest."""
        found = [(body, below) for body in self.objects.values() if (below := self._object_below(body)) is not None]
        return sorted(found, key=lambda pair: self._bottom(pair[0]))

    def _object_below(self, root: int) -> int | None:
        holder = int(self.model.geom_bodyid[self._below(root)[1]])
        return next((body for body in self.objects.values() if holder in self._bodies(body)), None)

    def _stack(self, stacked: list[tuple[int, int]]) -> None:
        """Put objects on each other without a gap, and what stands on the table on it. LIBERO's init states drop them
        from some centimetres, and objects of another size fall off each other."""
        if stacked:
            self._set_down(self._standing())
            self._pile_up(stacked)

    def _settle(self) -> None:
        """Put every object on what it stands on or will fall on."""
        stacked = self._stacked()
        self._set_down(set(self.objects.values()) - {body for body, _ in stacked})
        self._pile_up(stacked)

    def _pile_up(self, stacked: list[tuple[int, int]]) -> None:
        for body, below in stacked:
            self._put_on(body, below)
            self._update()

    def _set_down(self, bodies: Iterable[int]) -> None:
        """Lower these objects to what is below them, the lowest first."""
        for body in sorted(bodies, key=self._bottom):
            self._qpos(body)[2] -= max(0.0, self._bottom(body) - self._support(body))
            self._update()

    def _put_on(self, body: int, below: int) -> None:
        """Lower or lift an object to where it just does not touch another one."""
        height = float(self._qpos(body)[2])
        inside = height - self._bottom(body) + self._bottom(below)
        self._lift_out(body, below, inside, max(height, inside) + STACK_ROOM)

    def _lift_out(self, body: int, other: int, inside: float, outside: float) -> None:
        """To the lowest height between these two where it does not touch the other one."""
        place = self._qpos(body)
        while outside - inside > STACK_GAP:
            place[2] = (inside + outside) / 2
            if self._reaches_into(body, other):
                inside = place[2]
            else:
                outside = place[2]
        place[2] = outside

    def _reaches_into(self, body: int, other: int) -> bool:
        data = self._collided(self._positions)
        pairs = self.model.geom_bodyid[data.contact.geom]
        crossing = np.isin(pairs, self._bodies(body)).any(axis=1) & np.isin(pairs, self._bodies(other)).any(axis=1)
        return bool((crossing & (data.contact.dist < 0)).any())

    def _sites_of_goal(self, domain: Any) -> list[int]:
        """The regions in which, or on which, the goal wants something."""
        names = [place for _, *places in domain.parsed_problem["goal_state"] for place in places]
        return [self.model.site(name).id for name in names if name in domain.object_sites_dict]

    def _goal_containers(self) -> set[int]:
        """The objects that have such a region."""
        holders = self.model.site_bodyid[self._goal_sites].tolist()
        return {root for root in self.objects.values() if any(self._is_within(body, [root]) for body in holders)}

    def _without(self, kept: set[int]) -> list[int]:
        """The objects but these, and but those that share a mesh with them."""
        meshes = {mesh for body in kept for mesh in self._meshes(body)}
        return [body for body in self.objects.values() if body not in kept and not meshes & self._meshes(body)]

    def _meshes(self, root: int) -> set[int]:
        is_mesh = self.model.geom_type == mujoco.mjtGeom.mjGEOM_MESH
        return {int(self.model.geom_dataid[geom]) for geom in self._geoms(root) if is_mesh[geom]}

    def move_objects(self, vector: Vector) -> None:
        """Horizontally, those on the table and what stands on them. A region of the goal that is beside one of them
        stays beside it."""
        moved = self.movable()
        for body in moved:
            self._qpos(body)[:2] += vector
        for site in self._regions_beside(moved):
            frame = self._data.xmat[self.model.site_bodyid[site]].reshape(3, 3)
            self.model.site_pos[site] += frame.T @ (*vector, 0.0)
        self._update()

    def _regions_beside(self, roots: list[int]) -> list[int]:
        """Of those regions of the goal that are part of the table, the ones that LIBERO names after an object, such as
        living_room_table_plate_right_region."""
        kinds = {name.rpartition("_")[0] for name, body in self.objects.items() if body in roots}
        return [
            site
            for site in self._goal_sites
            if not self._is_within(int(self.model.site_bodyid[site]), self._entities)
            and any(f"_{kind}_" in self.model.site(site).name for kind in kinds)
        ]

    def can_move_objects(self, vector: Vector) -> bool:
        """Whether they stand on the table there as well, and reach into nothing that stays."""
        table, start, sites = self.table_height(), self.start.copy(), self.model.site_pos.copy()
        moved, standing = self.movable(), self._standing()
        self.move_objects(vector)
        refused = (
            not moved
            or self._touches(moved)
            or any(abs(self._support(body) - table) >= ON_TABLE for body in standing)
            or any(map(self._is_over_an_edge, standing))
            or not all(self._is_on_table(site, table) for site in self._regions_beside(moved))
        )
        self.start[:], self.model.site_pos[:] = start, sites
        self._update()
        return not refused

    def movable(self) -> list[int]:
        """The bodies of the objects on the table and of what stands on them."""
        standing = self._standing()
        places = self._data.xpos[standing, :2]
        others = (body for body in self.objects.values() if body not in standing)
        return standing + [
            body for body in others if (np.linalg.norm(places - self._data.xpos[body, :2], axis=1) < STACKED).any()
        ]

    def _standing(self) -> list[int]:
        """The bodies of the objects on the table itself. A stove is hardly higher, and what stands on it stays."""
        raised = {body for root in self._entities for body in self._bodies(root)}
        below = {body: self._below(body) for body in self.objects.values()}
        table = min(height for height, _ in below.values())
        return [
            body
            for body, (height, geom) in below.items()
            if height - table < ON_TABLE and int(self.model.geom_bodyid[geom]) not in raised
        ]

    def _is_on_table(self, site: int, table: float) -> bool:
        """Whether nothing but the table, and objects that can be moved, is where a region is."""
        passed = {geom for root in self.objects.values() for geom in self._geoms(root)}
        width, depth, _ = self.model.site_size[site]
        corners = np.array([(0, 0), (width, depth), (width, -depth), (-width, depth), (-width, -depth)])
        points = np.column_stack([self._data.site_xpos[site, :2] + corners, np.full(5, table + SPARE_HEADROOM)])
        return all(abs(self._ground(point, passed)[0] - table) < SAME_HEIGHT for point in points)

    def _is_over_an_edge(self, root: int) -> bool:
        """Whether a part of an object is where what it stands on has ended."""
        angles = np.linspace(0, 2 * np.pi, 8, endpoint=False)
        circle = self._reach(root) * np.stack([np.cos(angles), np.sin(angles)], axis=1)
        height = self._support(root)
        points = np.column_stack([self._data.xpos[root, :2] + circle, np.full(8, height + SAME_HEIGHT)])
        return any(self._surface(point)[0] < height - ON_TABLE for point in points)

    def _touches(self, moved: list[int]) -> bool:
        """Whether one of these objects reaches into a robot, furniture, an added object or another one."""
        own = {body for root in moved for body in self._bodies(root)}
        entities = (body for root in self._entities for body in self._bodies(root))
        other = {*self._robot_bodies(), *self._spares.tolist(), *entities} - own
        data = self._collided(self._positions)
        pairs = self.model.geom_bodyid[data.contact.geom]
        crossing = np.isin(pairs, sorted(own)).any(axis=1) & np.isin(pairs, sorted(other)).any(axis=1)
        return bool((crossing & (data.contact.dist < 0)).any())

    def table_height(self) -> float:
        """The lowest surface that an object stands on; those of LIBERO's init states are still above it."""
        return min(self._support(body) for body in self.objects.values())

    def place_spare(self, number: int, color: Vector, random: np.random.Generator) -> bool:
        """Put one of `SPARES` on the table, fixed to it; False if there is no room.

        Flat objects start inside the table in some of LIBERO's init states, where rays do not see them.
        """
        body = int(self._spares[number])
        geom = int(self.model.body_geomadr[body])
        lowest, radius = self.model.geom_aabb[geom, 5], float(np.linalg.norm(self.model.geom_aabb[geom, 3:5]))
        table, middle = self.table_height(), self.centre()[:2]
        circles = self._kept_free()
        for attempt in range(SPARE_ATTEMPTS):
            within = np.interp(attempt, (0, SPARE_ATTEMPTS), SPARE_REACH)
            place = middle + random.uniform(-within, within, 2)
            is_apart = all(np.linalg.norm(place - there) > radius + reach for there, reach in circles)
            if is_apart and self._is_empty(place, radius + SPARE_GAP, table):
                self.model.body_pos[body] = (*place, table + lowest)
                self.model.geom_rgba[geom] = color
                _set_solid(self.model, body, True)
                self._update()
                return True
        return False

    def _kept_free(self) -> list[tuple[Vector, float]]:
        """Circles on the table, by middle and radius: what stands there, and the regions of the goal."""
        objects = [(self._data.xpos[body, :2], self._reach(body)) for body in self._standing()]
        sizes = np.linalg.norm(self.model.site_size[self._goal_sites, :2], axis=1).tolist()
        return objects + list(zip(self._data.site_xpos[self._goal_sites, :2], sizes, strict=True))

    def _is_empty(self, place: Vector, radius: float, table: float) -> bool:
        """Whether nothing but the table lies below a circle."""
        angles = np.linspace(0, 2 * np.pi, 24, endpoint=False)
        circle = np.stack([np.cos(angles), np.sin(angles)], axis=1)
        points = place + radius * np.concatenate(
            [*(share * circle for share in (1.0, 0.75, 0.5, 0.25)), np.zeros((1, 2))]
        )
        heights = (self._surface(np.array([x, y, table + SPARE_HEADROOM]))[0] for x, y in points.tolist())
        return all(abs(height - table) < SAME_HEIGHT for height in heights)

    def _scale(self, root: int, factor: float) -> None:
        model = self.model
        for body in self._bodies(root):
            if body != root:
                model.body_pos[body] *= factor
            model.body_ipos[body] *= factor
            model.body_mass[body] *= factor**3
            model.body_inertia[body] *= factor**5
            nodes = slice(model.body_bvhadr[body], model.body_bvhadr[body] + model.body_bvhnum[body])
            model.bvh_aabb[nodes] *= factor
            model.site_pos[model.site_bodyid == body] *= factor
            model.jnt_pos[model.jnt_bodyid == body] *= factor
        for geom in self._geoms(root):
            for values in (model.geom_size, model.geom_pos, model.geom_aabb, model.geom_rbound):
                values[geom] *= factor

    def _scale_meshes(self, factor: float) -> None:
        """Once each: objects of one kind share them."""
        model = self.model
        meshes = {mesh for body in self._resized for mesh in self._meshes(body)}
        for mesh in meshes:
            vertices = slice(model.mesh_vertadr[mesh], model.mesh_vertadr[mesh] + model.mesh_vertnum[mesh])
            model.mesh_vert[vertices] *= factor
            nodes = slice(model.mesh_bvhadr[mesh], model.mesh_bvhadr[mesh] + model.mesh_bvhnum[mesh])
            model.bvh_aabb[nodes] *= factor
        self.meshes |= meshes

    # --- the arm ---

    def arm_joints(self) -> Vector:
        return self.start[1:][self._arm].copy()

    def set_arm_joints(self, joints: Vector) -> None:
        self.start[1:][self._arm] = joints
        self._update()

    def arm_is_free(self, joints: Vector) -> bool:
        """Whether the arm is within its limits there and touches nothing."""
        low, high = self.model.jnt_range[np.isin(self.model.jnt_qposadr, self._arm)].T
        if (joints < low).any() or (joints > high).any():
            return False
        positions = self._positions.copy()
        positions[self._arm] = joints
        data = self._collided(positions)
        robot = self._robot_bodies()
        pairs = self.model.geom_bodyid[data.contact.geom]
        return not (np.isin(pairs, list(robot)).sum(axis=1) == 1).any()

    @property
    def _arm(self) -> Ids:
        return np.array(self._robot._ref_joint_pos_indexes)

    def _robot_bodies(self) -> set[int]:
        prefixes = self._robot.robot_model.naming_prefix, self._robot.gripper.naming_prefix, "mount"
        return {body for body in range(self.model.nbody) if self.model.body(body).name.startswith(prefixes)}

    # --- the tree of bodies ---

    @property
    def _positions(self) -> Vector:
        return self.start[1 : 1 + self.model.nq]

    def _update(self) -> None:
        self._bottoms.clear()
        self._data.qpos[:] = self._positions
        mujoco.mj_kinematics(self.model, self._data)
        mujoco.mj_camlight(self.model, self._data)

    def _collided(self, positions: Vector) -> mujoco.MjData:
        """A simulation with its contacts at these positions."""
        data = mujoco.MjData(self.model)
        data.qpos[:] = positions
        mujoco.mj_fwdPosition(self.model, data)
        return data

    def _is_free(self, body: int) -> bool:
        joint = self.model.body_jntadr[body]
        return bool(joint >= 0 and self.model.jnt_type[joint] == mujoco.mjtJoint.mjJNT_FREE)

    def _qpos(self, body: int) -> Vector:
        """Position [3] of a free body in the init state, to be changed."""
        address = 1 + int(self.model.jnt_qposadr[self.model.body_jntadr[body]])
        return self.start[address : address + 3]

    def _bodies(self, root: int) -> list[int]:
        if root not in self._bodies_of:
            within = [body for body in range(1, self.model.nbody) if self._is_within(body, [root])]
            self._bodies_of[root] = within
        return self._bodies_of[root]

    def _is_within(self, body: int, roots: list[int]) -> bool:
        while body and body not in roots:
            body = int(self.model.body_parentid[body])
        return body in roots

    def _geoms(self, root: int) -> list[int]:
        if root not in self._geoms_of:
            own = np.isin(self.model.geom_bodyid, self._bodies(root))
            self._geoms_of[root] = np.flatnonzero(own).tolist()
        return self._geoms_of[root]

    def _support(self, root: int) -> float:
        return self._below(root)[0]

    def _below(self, root: int) -> tuple[float, int]:
        """Height and geom of what is below the middle of an object, which may reach a little into it; not of what
        stands on the object."""
        bottom, above = self._bottom(root), self._data.xpos[root].copy()
        passed = {
            geom
            for body in self.objects.values()
            if body == root or self._bottom(body) > bottom
            for geom in self._geoms(body)
        }
        above[2] = max(above[2], bottom + SUNK)
        return self._ground(above, passed)

    def _ground(self, above: Vector, passed: set[int]) -> tuple[float, int]:
        """Height and geom of the first surface below a point that is of none of the `passed` geoms."""
        point = above.copy()
        while True:
            height, geom = self._surface(point)
            if geom not in passed:
                return height, geom
            point[2] = height - BEHIND

    def _surface(self, above: Vector) -> tuple[float, int]:
        """Height of the first surface below a point, and its geom; where there is none, -inf and -1."""
        found, down = np.zeros(1, np.int32), np.array([0.0, 0.0, -1.0])
        distance = mujoco.mj_ray(self.model, self._data, above, down, None, 1, -1, found)
        return (float(above[2] - distance) if found[0] >= 0 else -np.inf), int(found[0])

    def _reach(self, root: int) -> float:
        """The largest horizontal distance of what collides from the middle of an object."""
        reach = 0.0
        for geom in self._geoms(root):
            if self.model.geom_contype[geom] or self.model.geom_conaffinity[geom]:
                rotation = self._data.geom_xmat[geom].reshape(3, 3)[:2]
                middle = self._data.geom_xpos[geom, :2] + rotation @ self.model.geom_aabb[geom, :3]
                offset = np.abs(middle - self._data.xpos[root, :2]) + np.abs(rotation) @ self.model.geom_aabb[geom, 3:]
                reach = max(reach, float(np.linalg.norm(offset)))
        return reach

    def _bottom(self, root: int) -> float:
        """The lowest point of what collides."""
        if root not in self._bottoms:
            self._bottoms[root] = self._lowest(root)
        return self._bottoms[root]

    def _lowest(self, root: int) -> float:
        lowest = float(self._data.xpos[root, 2])
        for geom in self._geoms(root):
            if self.model.geom_contype[geom] or self.model.geom_conaffinity[geom]:
                row = self._data.geom_xmat[geom].reshape(3, 3)[2]
                middle = self._data.geom_xpos[geom, 2] + row @ self.model.geom_aabb[geom, :3]
                lowest = min(lowest, float(middle - np.abs(row) @ self.model.geom_aabb[geom, 3:]))
        return lowest
