"""Where objects stand, in scenes of every kind, in LIBERO's evaluation states and in settled ones for training."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice, product

import numpy as np
import pytest
from numpy.typing import NDArray

from nightshift import config, envs
from nightshift.envs.libero.env import LiberoEnv
from nightshift.envs.libero.fleet import LiberoFleet
from nightshift.envs.libero.scene_model import SPARES, SceneModel
from nightshift.envs.mini.suite import LIBERO_MINI
from nightshift.envs.perturbations import registry
from nightshift.envs.perturbations.base import MAX_STRENGTH, EpisodeKey, Perturbation
from nightshift.envs.perturbations.fleet import perturbed
from nightshift.envs.perturbations.objects import METRES_PER_LEVEL
from nightshift.envs.protocols import DEFAULT
from nightshift.types import PerturbationSpec, RolloutRequest
from tests.envs.test_suites import needs_assets

CAMERAS = config.Cameras(names=(), size=32, shadows=False)
MINI_TABLE = 0.9
STATES = 3
BESIDE = np.array([0.005, 0.01, 0.03])
"""From the middle of a shape, in metres: MuJoCo finds no contact of two that have one middle, or cross each other."""
SCENES = [
    *(pytest.param("libero_mini", task.name, MINI_TABLE, set(), id=task.name) for task in LIBERO_MINI.tasks()),
    *(
        pytest.param(suite, words, height, stays, id=words, marks=[needs_assets, *marks])
        for suite, words, height, stays, *marks in (
            ("libero_spatial", "on_the_ramekin", 0.9, set()),
            ("libero_spatial", "on_the_stove", 0.9, {"akita_black_bowl_1", "akita_black_bowl_2"}, pytest.mark.slow),
            ("libero_object", "pick_up_the_butter", 0.0, set()),
            ("libero_goal", "put_the_wine_bottle_on_the_rack", 0.9, set(), pytest.mark.slow),
            ("libero_10", "LIVING_ROOM_SCENE5", 0.437, set(), pytest.mark.slow),
            ("libero_10", "STUDY_SCENE1", 0.885, set(), pytest.mark.slow),
        )
    ),
]
"""Suite, task or words of its name, the height of the table, and what stands on furniture."""
with_scenes = pytest.mark.parametrize(("suite", "words", "height", "stays"), SCENES, scope="module")


@pytest.fixture(scope="module")
def env(suite: str, words: str) -> Iterator[LiberoEnv]:
    task = next(task for task in envs.suite(suite).tasks() if words in task.name)
    fleet = envs.suite(suite).make_fleet(task, DEFAULT, CAMERAS)
    assert isinstance(fleet, LiberoFleet)
    yield fleet._lanes[0]
    fleet.close()


def scenes(env: LiberoEnv) -> Iterator[SceneModel]:
    furnished = env._furnish()
    for start in starts(env):
        scene = SceneModel(env._domain, furnished, start)
        yield scene
        furnished.copies.give_back(scene.model)


def starts(env: LiberoEnv) -> list[NDArray[np.float64]]:
    drawn = (env.sample_state(seed) for seed in count())
    settled = (state for state in drawn if state is not None)
    return [*(env._state("eval", number) for number in range(STATES)), *(next(settled) for _ in range(STATES))]


def strongest(name: str, number: int) -> Perturbation:
    return registry.find(name)(PerturbationSpec(name=name, strength=MAX_STRENGTH), EpisodeKey("", number, 0))


def places(scene: SceneModel) -> NDArray[np.float64]:
    return np.stack([scene._qpos(body)[:2] for body in scene.movable()])


@with_scenes
def test_everything_on_the_table_is_found_and_moved_to_full_strength(
    env: LiberoEnv, height: float, stays: set[str]
) -> None:
    for number, scene in enumerate(scenes(env)):
        assert scene.table_height() == pytest.approx(height, abs=0.001)
        before, movable = places(scene), scene.movable()
        assert {name for name, body in scene.objects.items() if body not in movable} == stays
        change = strongest("object_positions", number)
        change.change_scene(scene)
        moved = np.linalg.norm(places(scene) - before, axis=1)
        assert change.reached == MAX_STRENGTH
        assert moved == pytest.approx(METRES_PER_LEVEL * MAX_STRENGTH)


@with_scenes
def test_added_objects_are_solid_and_moved_objects_keep_clear_of_them(
    env: LiberoEnv, height: float, stays: set[str]
) -> None:
    for number, scene in enumerate(scenes(env)):
        confounding = strongest("confounding_objects", number)
        confounding.change_scene(scene)
        assert confounding.reached == len(SPARES)
        assert not touched(scene)
        strongest("object_positions", number).change_scene(scene)
        assert not touched(scene)
        for spare in scene._spares:
            push_into(scene, spare)
            assert int(spare) in touched(scene)


def test_no_object_is_added_where_the_goal_wants_something() -> None:
    task = next(task for task in LIBERO_MINI.tasks() if task.name == "push_block_to_zone")
    fleet = LIBERO_MINI.make_fleet(task, DEFAULT, CAMERAS)
    env = fleet._lanes[0]
    zone = env._model.site("main_table_zone")
    furnished = env._furnish()
    for number in range(20):
        scene = SceneModel(env._domain, furnished, env._state("eval", number))
        strongest("confounding_objects", number).change_scene(scene)
        middle = scene._data.site_xpos[zone.id, :2]
        apart = np.linalg.norm(scene.model.body_pos[scene._spares, :2] - middle, axis=1)
        assert (apart > np.linalg.norm(zone.size[:2])).all()
        furnished.copies.give_back(scene.model)
    fleet.close()


LARGER = 1.25
"""At full strength."""
TASKS = [
    pytest.param(suite, words, expected, id=words, marks=[needs_assets] if suite != "libero_mini" else [])
    for suite, words, expected in (
        ("libero_mini", "lift_cube", True),
        ("libero_mini", "place_can_in_tray", False),  # its middle would be above the tray's region
        ("libero_spatial", "bowl_next_to_the_plate", False),  # the plate would throw the bowl off the table
        ("libero_spatial", "on_the_stove", True),
        ("libero_10", "KITCHEN_SCENE3", False),  # LIBERO would not call the pot on the stove
        ("libero_10", "KITCHEN_SCENE6", True),
    )
]


@pytest.mark.parametrize(("suite", "words", "expected"), TASKS, scope="module")
def test_objects_grow_where_they_have_room_and_the_goal_stays_within_reach(
    env: LiberoEnv, words: str, expected: bool
) -> None:
    """In LIBERO's evaluation states; those drawn for training have more room."""
    for scene, start in islice(zip(scenes(env), starts(env), strict=True), STATES):
        before = changeable(scene)
        assert scene.can_scale_objects(LARGER) == expected
        assert scene.can_scale_objects(1.0)
        assert (scene.start == start).all()
        assert changeable(scene) == before, "it was only tried"


def changeable(scene: SceneModel) -> dict[str, bytes]:
    values = {name: getattr(scene.model, name) for name in dir(scene.model)}
    return {name: value.tobytes() for name, value in values.items() if isinstance(value, np.ndarray)}


@pytest.mark.parametrize(
    ("suite", "words", "moves"),
    [
        pytest.param("libero_10", "LIVING_ROOM_SCENE6", True, id="right of the plate", marks=needs_assets),
        pytest.param("libero_goal", "front_of_the_stove", False, id="in front of the stove", marks=needs_assets),
        pytest.param("libero_mini", "push_block_to_zone", False, id="a place on the table"),
    ],
    scope="module",
)
def test_a_region_beside_an_object_stays_beside_it_where_objects_are_moved(
    env: LiberoEnv, words: str, moves: bool
) -> None:
    for number, scene in enumerate(scenes(env)):
        (site,) = (one for one in scene._goal_sites if "table" in scene.model.site(one).name)
        object_at, region_at = places(scene)[0], scene._data.site_xpos[site].copy()
        change = strongest("object_positions", number)
        change.change_scene(scene)
        moved = np.append(places(scene)[0] - object_at, 0.0)
        assert change.reached == MAX_STRENGTH
        assert scene._data.site_xpos[site] - region_at == pytest.approx(moved if moves else 0 * moved)


def push_into(scene: SceneModel, spare: int) -> None:
    """A part of an object: some are hollow."""
    body = scene.movable()[0]
    part = next(geom for geom in scene._geoms(body) if scene.model.geom_contype[geom])
    scene._update()
    beside = np.minimum(BESIDE, 0.8 * scene.model.geom_aabb[scene.model.body_geomadr[spare], 3:])
    scene._qpos(body)[:] += scene.model.body_pos[spare] + beside - scene._data.geom_xpos[part]


def touched(scene: SceneModel) -> set[int]:
    """Added objects that something reaches into."""
    found = scene._collided(scene._positions).contact
    pairs = scene.model.geom_bodyid[found.geom[found.dist < 0]]
    return set(np.intersect1d(pairs, scene._spares).tolist())


def test_what_there_is_nothing_to_resize_of_reaches_no_strength() -> None:
    for task in LIBERO_MINI.tasks():
        fleet = LIBERO_MINI.make_fleet(task, DEFAULT, CAMERAS)
        change = strongest("object_sizes", 0)
        fleet.altered([change], "eval", 0).close()
        assert change.reached == (0.0 if task.name == "open_drawer" else MAX_STRENGTH)
        fleet.close()


@needs_assets
def test_bowls_that_stand_on_another_object_stand_on_it_in_every_size() -> None:
    suite = envs.suite("libero_spatial")
    task = next(task for task in suite.tasks() if "on_the_ramekin" in task.name)
    fleet = suite.make_fleet(task, DEFAULT, CAMERAS)
    below = {"akita_black_bowl_1": "glazed_rim_porcelain_ramekin_1", "akita_black_bowl_2": "cookies_1"}
    sizes = set()
    for seed, strength in product(range(4), (1.0, 4.0, MAX_STRENGTH)):
        spec = PerturbationSpec(name="object_sizes", strength=strength)
        asked = RolloutRequest(
            task=task.name, split="eval", init_state=0, controller="greedy", seed=seed, perturbations=(spec,)
        )
        world = perturbed(fleet, asked)
        world.reset("eval", [0])
        for _ in range(20):
            world.step(np.zeros((1, 7), np.float32), np.ones(1, bool))
        bodies = world.scene(0).bodies
        for bowl, base in ((bodies[name], bodies[base]) for name, base in below.items()):
            offset = bowl.position - base.position
            assert offset[2] > 0.004 and np.linalg.norm(offset[:2]) < 0.03, (seed, strength)
            assert bowl.rotation.reshape(3, 3)[2, 2] > 0.9, "upright"
            sizes.add(float(bowl.half_size[0].round(3)))
        world.close()
    fleet.close()
    assert len(sizes) == 6, "three that are smaller, and three that are larger"
