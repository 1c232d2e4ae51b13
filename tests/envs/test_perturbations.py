"""Perturbations on real simulators: each changes what it says and nothing else, and a stronger one goes further."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mujoco
import numpy as np
import pytest
from numpy.typing import NDArray

from nightshift import config, envs
from nightshift.envs.base import Fleet
from nightshift.envs.fake import FAKE
from nightshift.envs.libero.fleet import LiberoFleet
from nightshift.envs.libero.model_copies import MOST_IDLE, ModelCopies
from nightshift.envs.libero.scene_model import SPARE_GAP, SceneModel
from nightshift.envs.libero.suites import LIBERO_GOAL
from nightshift.envs.mini.suite import LIBERO_MINI
from nightshift.envs.perturbations import actions, objects, paraphrases, registry, robot, sensors
from nightshift.envs.perturbations.base import EpisodeKey, Perturbation
from nightshift.envs.perturbations.fleet import PerturbedFleet, perturbed
from nightshift.envs.protocols import DEFAULT
from nightshift.errors import ConfigError, SimulatorError
from nightshift.rollouts.local import LocalPool
from nightshift.types import GRIPPER_CLOSED, GRIPPER_OPEN, Array, Body, PerturbationSpec, RolloutRequest, Trajectory
from tests.conftest import REPOSITORY
from tests.envs.test_suites import needs_assets

STATE, SEED = 3, 5
CAMERAS = config.Cameras(names=("agentview",), size=64, shadows=False)  # shadows take five times as long to draw
TASK = LIBERO_MINI.tasks()[4]
PIXELS = ("camera_viewpoints", "field_of_view", "light_conditions", "background_textures", "object_colors")
"""Of the scene, but for eyes only."""
STEPS = 6
ALL = np.ones(1, np.bool_)
MAX_WORDS = {
    name: config.read_yaml(REPOSITORY / "recipes" / f"{name}.yaml")["policy"]["max_words"]
    for name in ("mini_pixels", "libero_pixels")
}
"""That the policies of the recipes read."""


@pytest.fixture(scope="module")
def fleet() -> Iterator[LiberoFleet]:
    made = LIBERO_MINI.make_fleet(TASK, DEFAULT, CAMERAS)
    made.reset("eval", [STATE])
    if made.render(0) is None:
        pytest.skip("no GL library works here")
    yield made
    made.close()


def request(*specs: tuple[str, float], task: str = TASK.name, **changes: Any) -> RolloutRequest:
    found = tuple(PerturbationSpec(name=name, strength=strength, instruction="other words") for name, strength in specs)
    chosen = {"task": task, "split": "eval", "init_state": STATE, "controller": "greedy", "seed": SEED}
    return RolloutRequest(**{**chosen, "perturbations": found, **changes})


class Seen(NamedTuple):
    """Of an episode."""

    places: NDArray[np.float64]  # of the hand and of every object, after the reset and after every step
    sizes: NDArray[np.float64]
    image: NDArray[np.uint8]
    observed: Array


def moves() -> Array:
    return np.random.default_rng(0).uniform(-1, 1, (STEPS, 7)).astype(np.float32)


def bodies(fleet: Fleet) -> list[Body]:
    """Those that collide: no regions."""
    return [body for body in fleet.scene(0).bodies.values() if body.boxes is not None]


def places(fleet: Fleet) -> NDArray[np.float64]:
    return np.stack([fleet.scene(0).gripper_position, *(body.position for body in bodies(fleet))])


def play(fleet: Fleet, asked: RolloutRequest, chosen: Array | None = None) -> Seen:
    world = perturbed(fleet, asked)
    observed = [world.reset(asked.split, [asked.init_state])["objects"].copy()]
    image = world.look(np.arange(1), ["agentview"])["agentview"][0]
    there = [places(world)]
    for action in moves() if chosen is None else chosen:
        observed.append(world.step(action[None], ALL).observation["objects"].copy())
        there.append(places(world))
    sizes = np.stack([body.half_size for body in bodies(world)])
    return Seen(np.stack(there), sizes, image, np.stack(observed))


@pytest.fixture(scope="module")
def calm(fleet: LiberoFleet) -> Seen:
    return play(fleet, request())


def same(one: Seen, other: Seen) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in Seen._fields)


def apart(one: NDArray[Any], other: NDArray[Any]) -> float:
    return float(np.abs(one.astype(np.float64) - other).mean())


@pytest.mark.parametrize("name", PIXELS)
def test_a_perturbation_for_eyes_changes_pixels_and_no_bit_of_the_physics(
    name: str, fleet: LiberoFleet, calm: Seen
) -> None:
    weak, strong = (play(fleet, request((name, strength))) for strength in (1.0, 4.0))
    assert (strong.places == calm.places).all()
    assert (strong.observed == calm.observed).all()
    assert 0 < apart(weak.image, calm.image) < apart(strong.image, calm.image)


@pytest.mark.parametrize("name", registry.names())
def test_strength_zero_is_the_unperturbed_world(name: str, fleet: LiberoFleet) -> None:
    assert perturbed(fleet, request((name, 0.0))) is fleet


def test_a_world_of_another_perturbation_leaves_nothing_in_the_next_one(fleet: LiberoFleet) -> None:
    """Its model is used again, set back to the original."""
    own = play(fleet, request(("camera_viewpoints", 2.0)))
    names = [name for name in registry.names() if registry.find(name).kind == "scene"]
    before = perturbed(fleet, request(*((name, 5.0) for name in names)))
    before.reset("eval", [STATE])
    used = model_of(before)
    before.close()
    again = perturbed(fleet, request(("camera_viewpoints", 2.0)))
    again.reset("eval", [STATE])
    assert model_of(again) is used
    again.close()
    assert same(play(fleet, request(("camera_viewpoints", 2.0))), own)


def model_of(world: Fleet) -> mujoco.MjModel:
    assert isinstance(world, PerturbedFleet) and isinstance(world._fleet, LiberoFleet)
    return world._fleet._lanes[0]._model


def test_a_model_that_is_used_again_has_all_numbers_of_the_original(fleet: LiberoFleet) -> None:
    original = fleet._lanes[0]._model
    copies = ModelCopies(original)
    changed = copies.take()
    for name in public(changed):
        if isinstance(values := getattr(changed, name), np.ndarray):
            values.view(np.uint8)[...] ^= 1
    changed.vis.headlight.ambient = changed.vis.headlight.ambient + 1
    changed.vis.global_.fovy += 1
    changed.stat.meaninertia += 1
    changed.opt.timestep += 1
    copies.give_back(changed)
    assert copies.take() is changed
    for name in public(original):
        if isinstance(values := getattr(original, name), np.ndarray):
            assert getattr(changed, name).tobytes() == values.tobytes(), name
    assert (changed.vis.headlight.ambient == original.vis.headlight.ambient).all()
    assert changed.vis.global_.fovy == original.vis.global_.fovy
    assert changed.stat.meaninertia == original.stat.meaninertia
    assert changed.opt.timestep == original.opt.timestep


def test_a_process_keeps_few_models_that_nobody_uses_however_many_tasks_it_plays(fleet: LiberoFleet) -> None:
    original = fleet._lanes[0]._model
    of_tasks = [ModelCopies(original) for _ in range(3)]
    for copies in of_tasks:
        in_use = [copies.take() for _ in range(MOST_IDLE // 2 + 1)]
        for model in in_use:
            copies.give_back(model)
    assert len(ModelCopies._idle) == MOST_IDLE
    last = in_use[-1]
    assert of_tasks[-1].take() is last
    for copies in of_tasks:
        copies.drop_idle()
    assert not [owner for owner, _ in ModelCopies._idle if owner in of_tasks]


def public(model: mujoco.MjModel) -> list[str]:
    return [name for name in dir(model) if not name.startswith("_")]


def test_two_episodes_at_once_have_models_of_their_own(fleet: LiberoFleet) -> None:
    worlds = [perturbed(fleet, request(("field_of_view", strength))) for strength in (1.0, 2.0)]
    for world in worlds:
        world.reset("eval", [STATE])
    one, other = map(model_of, worlds)
    assert one is not other and not (one.cam_fovy == other.cam_fovy).all()
    for world in worlds:
        world.close()
        world.close()
    assert len({id(model) for model in (fleet._lanes[0]._furnish().copies.take() for _ in range(2))}) == 2


@pytest.mark.parametrize("name", registry.names())
def test_an_episode_depends_on_name_strength_task_state_and_seed_alone(name: str, fleet: LiberoFleet) -> None:
    one, again = (play(fleet, request((name, 3.0))) for _ in range(2))
    assert same(one, again)
    key = EpisodeKey(TASK.name, STATE, SEED)
    others = key._replace(seed=6), key._replace(init_state=4), key._replace(task="lift_cube")
    found = registry.find(name)
    draws = {found(PerturbationSpec(name=name, strength=3.0), k).random().random() for k in (key, *others)}
    assert len(draws) == 4


def test_the_fleet_looks_as_before_after_others_of_its_context_were_drawn(fleet: LiberoFleet, calm: Seen) -> None:
    play(fleet, request(("background_textures", 5.0), ("object_colors", 5.0), ("object_sizes", 5.0)))
    assert (play(fleet, request()).image == calm.image).all()


def test_objects_grow_or_shrink_and_stand_where_they_stood(fleet: LiberoFleet, calm: Seen) -> None:
    for strength in (1.0, 5.0):
        seen = play(fleet, request(("object_sizes", strength)))
        factors = seen.sizes / calm.sizes
        assert np.allclose(np.abs(factors - 1), objects.SCALE_PER_LEVEL * strength)
        assert len(np.unique(factors.round(6))) == 1
        ours, theirs = (one.places[0, 1:, 2] - one.sizes[:, 2] for one in (seen, calm))
        assert np.allclose(ours, theirs, atol=1e-6)
        assert (seen.places[0, :, :2] == calm.places[0, :, :2]).all()
        assert (seen.places[:, 0] == calm.places[:, 0]).all(), "the arm moves freely"


def test_objects_of_another_size_still_rest_on_the_table(fleet: LiberoFleet) -> None:
    still = np.zeros((10, 7), np.float32)
    for strength in (2.0, 5.0):
        there = play(fleet, request(("object_sizes", strength)), still).places
        assert np.abs(there[-1, 1:] - there[0, 1:]).max() < 2e-3


def test_objects_start_elsewhere_all_moved_by_the_same_vector(fleet: LiberoFleet, calm: Seen) -> None:
    moved = {}
    for strength in (1.0, 5.0):
        shift = play(fleet, request(("object_positions", strength))).places[0] - calm.places[0]
        assert (shift[0] == 0).all(), "the hand stays"
        assert np.allclose(shift[1:], shift[1]) and np.allclose(shift[:, 2], 0)
        moved[strength] = shift[1]
        assert np.linalg.norm(shift[1]) == pytest.approx(objects.METRES_PER_LEVEL * strength)
    assert np.allclose(5 * moved[1.0], moved[5.0])


@pytest.mark.parametrize(
    ("is_free", "room"), [(lambda way: way < 0.039, 0.035), (lambda way: not 0.031 < way < 0.05, 0.03)]
)
def test_where_objects_have_little_room_a_stronger_move_is_not_shorter_and_skips_nothing(
    is_free: Callable[[float], bool], room: float, fleet: LiberoFleet, calm: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SceneModel, "can_move_objects", lambda _, vector: is_free(float(np.linalg.norm(vector))))
    strengths = (1.0, 2.0, 3.0, 4.0, 5.0)
    starts = [play(fleet, request(("object_positions", s)), moves()[:0]).places[0] for s in strengths]
    moved = [np.linalg.norm((start - calm.places[0])[1]) for start in starts]
    assert moved == pytest.approx([0.02, room, room, room, room])


def test_an_arm_without_room_goes_as_far_as_it_can(fleet: LiberoFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    home = joints(fleet)
    monkeypatch.setattr(SceneModel, "arm_is_free", lambda _, q: bool(np.linalg.norm(q - home) < 0.1))
    found = [np.linalg.norm(joints(fleet, ("robot_initial_states", s)) - home) for s in (1.0, 3.0, 5.0)]
    assert found == pytest.approx([0.06, 0.09, 0.09])


def test_looking_for_room_changes_no_bit_of_the_init_state(fleet: LiberoFleet) -> None:
    class Looking(Perturbation):
        def change_scene(self, scene: SceneModel) -> None:
            before = scene.start.copy()
            scene.can_move_objects(np.array([0.0123, -0.0077]))
            assert (scene.start == before).all()

    fleet.altered([Looking(PerturbationSpec(name="", strength=1.0), EpisodeKey("", 0, 0))], "eval", STATE)


def test_a_container_of_the_goal_keeps_its_size_with_the_region_that_decides_success() -> None:
    task = next(task for task in LIBERO_MINI.tasks() if task.name == "place_can_in_tray")
    tray = LIBERO_MINI.make_fleet(task, DEFAULT, CAMERAS)
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    for seen, strength in ((before, 0.0), (after, 5.0)):
        world = perturbed(tray, request(("object_sizes", strength), task=task.name))
        world.reset("eval", [STATE])
        seen.update({name: body.half_size for name, body in world.scene(0).bodies.items()})
    tray.close()
    same_size = {name for name in before if np.allclose(before[name], after[name])}
    assert same_size >= {"tray_1", "tray_1_inside"} and "can_1" not in same_size


def test_an_episode_says_how_far_a_perturbation_came_where_the_scene_has_nothing_for_it() -> None:
    env = config.load(REPOSITORY / "params.yaml").env.model_copy(update={"tasks": ("open_drawer",), "horizon": 2})
    pool = LocalPool(env)
    asked = request(("object_sizes", 2.0), ("field_of_view", 2.0), task="open_drawer", controller="expert")
    ((_, (episode,)),) = pool.run([asked])
    assert episode.reached == {"object_sizes": 0.0}
    pool.close()


def test_the_arm_starts_in_another_pose_and_nothing_else_does(fleet: LiberoFleet, calm: Seen) -> None:
    home = joints(fleet)
    steps = {strength: joints(fleet, ("robot_initial_states", strength)) - home for strength in (1.0, 5.0)}
    for strength, step in steps.items():
        assert np.linalg.norm(step) == pytest.approx(robot.RADIANS_PER_LEVEL * strength)
    assert np.allclose(5 * steps[1.0], steps[5.0])
    seen = play(fleet, request(("robot_initial_states", 5.0)))
    assert (seen.places[0, 1:] == calm.places[0, 1:]).all()
    assert np.linalg.norm(seen.places[0, 0] - calm.places[0, 0]) > 0.02


def joints(fleet: LiberoFleet, *specs: tuple[str, float]) -> NDArray[np.float64]:
    asked = request(*specs)
    world = fleet.altered(registry.drawn(asked), "eval", STATE) if specs else fleet
    world.reset("eval", [STATE])
    return np.asarray(world._lanes[0].arm_readings()["q"])


def test_confounding_objects_stand_apart_and_move_nothing(fleet: LiberoFleet, calm: Seen) -> None:
    still = np.zeros((10, 7), np.float32)
    seen = play(fleet, request(("confounding_objects", 5.0)), still)
    assert np.abs(seen.places - play(fleet, request(), still).places).max() < 1e-9
    three, five = (spares(fleet, strength) for strength in (3.0, 5.0))
    assert (len(three), len(five)) == (3, 5)
    assert (five[:3] == three).all(), "more of them, and the same"
    gaps = np.linalg.norm(five[:, None] - calm.places[0, 1:, :2], axis=2)
    assert gaps.min() > SPARE_GAP
    assert apart(play(fleet, request(("confounding_objects", 1.0))).image, calm.image) > 0


def spares(fleet: LiberoFleet, strength: float) -> NDArray[np.float64]:
    """Where they stand on the table."""
    model = fleet.altered(registry.drawn(request(("confounding_objects", strength))), "eval", STATE)._lanes[0]._model
    names = [f"spare_{number}" for number in range(5)]
    return np.array([model.body(name).pos[:2] for name in names if model.geom(name).contype[0]])


def test_delayed_actions_are_the_same_actions_after_a_pause(fleet: LiberoFleet) -> None:
    late = play(fleet, request(("action_delay", 2.0)))
    pause = np.zeros((2, 7), np.float32)
    assert (late.places == play(fleet, request(), np.concatenate([pause, moves()])[:STEPS]).places).all()


@pytest.mark.parametrize("name", ["action_noise", "action_delay", "sensor_noise"])
def test_noise_and_delay_do_not_depend_on_how_steps_are_grouped_into_calls(name: str, fleet: LiberoFleet) -> None:
    asked = request((name, 2.0))
    one_by_one = play(fleet, asked).observed[-1]
    chunk = perturbed(fleet, asked)
    chunk.reset("eval", [STATE])
    after, made = chunk.advance(moves()[None], ALL)
    assert made.tolist() == [STEPS]
    assert (after.observation["objects"] == one_by_one).all()


def test_the_noise_of_an_episode_is_the_same_alone_and_in_a_group(fleet: LiberoFleet) -> None:
    asked = request(("action_noise", 2.0), ("sensor_noise", 2.0), count=3)
    group = perturbed(fleet, asked)
    group.reset("eval", [STATE] * 3)
    for action in moves():
        shown = group.step(np.tile(action, (3, 1)), np.ones(3, np.bool_)).observation["objects"]
    assert (shown[0] == play(fleet, asked).observed[-1, 0]).all()
    assert not (shown[1] == shown[0]).all()


def test_action_noise_has_the_spread_that_its_strength_says() -> None:
    for strength in (1.0, 5.0):
        noise = drawn("action_noise", strength).change_actions(np.zeros((1, 500, 7), np.float32), np.zeros(1, np.int64))
        assert noise.std() == pytest.approx(actions.NOISE_PER_LEVEL * strength, rel=0.05)


def slipping(strength: float, steps: int = 4_000) -> NDArray[np.float32]:
    """The gripper's part of actions that tell it nothing, which slips replace."""
    told = np.zeros((1, steps, 7), np.float32)
    changed = drawn("gripper_slips", strength).change_actions(told, np.zeros(1, np.int64))
    assert (changed[..., :-1] == told[..., :-1]).all()
    return np.asarray(changed[0, :, -1])


def test_a_hand_that_slips_opens_all_the_way_and_then_closes() -> None:
    forced = slipping(5.0)
    begins = np.flatnonzero((forced[1:] == GRIPPER_OPEN) & (forced[:-1] != GRIPPER_OPEN)) + 1
    assert len(begins) > 20
    for begin in begins:
        slip = forced[begin : begin + 2 * actions.SLIP_STEPS]
        assert slip.tolist() == [GRIPPER_OPEN] * actions.SLIP_STEPS + [GRIPPER_CLOSED] * actions.SLIP_STEPS


def test_slips_are_as_frequent_as_their_strength_says_and_stronger_ones_keep_those_of_weaker_ones() -> None:
    weak, strong = slipping(2.0), slipping(4.0)
    assert (strong[weak != 0] == weak[weak != 0]).all()
    for strength, forced in ((2.0, weak), (4.0, strong)):
        slips = np.count_nonzero(forced) / (2 * actions.SLIP_STEPS)
        stretches = len(forced) / actions.SLIP_STRETCH
        assert slips / stretches == pytest.approx(actions.SLIPS_PER_LEVEL * strength, abs=0.1)


@pytest.mark.parametrize("size", [1, 8, 37])
def test_slips_do_not_depend_on_how_steps_are_grouped_into_calls(size: int) -> None:
    slips = drawn("gripper_slips", 5.0)
    starts = range(0, 400, size)
    told = [np.zeros((1, min(size, 400 - start), 7), np.float32) for start in starts]
    parts = [slips.change_actions(part, np.array([start])) for start, part in zip(starts, told, strict=True)]
    assert np.concatenate(parts, axis=1)[0, :, -1].tolist() == slipping(5.0, 400).tolist()


def test_the_expert_grasps_again_what_the_hand_let_go_and_what_it_chose_is_recorded() -> None:
    """The gripper that a demo records stays closed while the hand opens by itself."""
    task = "stack_red_on_blue"
    env = config.load(REPOSITORY / "params.yaml").env.model_copy(update={"tasks": (task,), "horizon": 120})
    calm = request(task=task, controller="expert", init_state=7)
    slips = request(("gripper_slips", 5.0), task=task, controller="expert", init_state=7)
    pool = LocalPool(env)
    undisturbed, demo = (episode for _, (episode,) in sorted(pool.run([calm, slips])))
    pool.close()
    assert demo.success and demo.length > undisturbed.length
    assert len(openings(undisturbed)) == 1, "the fingers open once, at the start"
    assert len(openings(demo)) == 2
    assert (demo.actions[openings(demo)[1], -1] == GRIPPER_CLOSED).all()


def openings(episode: Trajectory) -> list[slice]:
    """The stretches of an episode in which the fingers move apart by a centimetre or more."""
    width = np.abs(episode.observations["proprio"][:, -2:]).sum(axis=1)
    edges = np.flatnonzero(np.diff(np.r_[False, np.diff(width) > 0.001, False].astype(int)))
    stretches = [slice(first, last) for first, last in edges.reshape(-1, 2).tolist()]
    return [found for found in stretches if width[found.stop] - width[found.start] > 0.01]


def drawn(name: str, strength: float) -> Any:
    (found,) = registry.drawn(request((name, strength)))
    return found


def test_sensor_noise_changes_what_is_seen_and_not_what_is(fleet: LiberoFleet, calm: Seen) -> None:
    seen = play(fleet, request(("sensor_noise", 3.0)))
    assert (seen.places == calm.places).all()
    assert apart(seen.image, calm.image) > 0
    noise = seen.observed - calm.observed
    assert noise.std() == pytest.approx(sensors.STD_PER_LEVEL * 3, rel=0.25)
    world = perturbed(fleet, request(("sensor_noise", 3.0)))
    assert (world.reset("eval", [STATE])["task"] == fleet.reset("eval", [STATE])["task"]).all(), "no sensor says that"


@pytest.mark.parametrize("degrade", sensors.DEGRADATIONS)
def test_every_degradation_of_an_image_is_stronger_at_a_higher_severity(degrade: sensors.Degrade, calm: Seen) -> None:
    image = calm.image.astype(np.float64)
    weak, strong = (degrade(image, severity, np.random.default_rng(0)) for severity in (2.0, 10.0))
    assert weak.shape == image.shape
    assert 0 < apart(weak, image) < apart(strong, image)


def test_an_instruction_in_other_words_changes_nothing_else(fleet: LiberoFleet, calm: Seen) -> None:
    asked = request(("language_instructions", 1.0))
    assert perturbed(fleet, asked).task.language == "other words"
    assert fleet.task.language == TASK.language
    assert same(play(fleet, asked), calm)


def test_perturbations_compose(fleet: LiberoFleet, calm: Seen) -> None:
    both = play(fleet, request(("object_positions", 2.0), ("object_sizes", 2.0), ("camera_viewpoints", 2.0)))
    moved = play(fleet, request(("object_positions", 2.0)))
    assert (both.places[0, :, :2] == moved.places[0, :, :2]).all()
    assert (both.sizes == play(fleet, request(("object_sizes", 2.0))).sizes).all()
    assert apart(both.image, moved.image) > apart(moved.image, calm.image) / 10


@pytest.mark.slow
@needs_assets
def test_a_scene_of_libero_is_perturbed_as_well() -> None:
    """With meshes, textures of objects, furniture, and objects that are still above the table."""
    task = LIBERO_GOAL.tasks()[3]
    fleet = LIBERO_GOAL.make_fleet(task, DEFAULT, CAMERAS)
    calm = play(fleet, request(task=task.name))
    for name in registry.names():
        seen = play(fleet, request((name, 3.0), task=task.name))
        assert np.isfinite(seen.places).all()
        kind = registry.find(name)
        if name in PIXELS:
            assert (seen.places == calm.places).all(), name
        if kind.kind == "scene":
            assert apart(seen.image, calm.image) > 0, name
    assert (play(fleet, request(task=task.name)).image == calm.image).all()
    fleet.close()


def env(suite: str, **changes: Any) -> config.Env:
    chosen = {"suite": suite, "tasks": (), "protocol": "openvla-oft", "horizon": 20, "cameras": CAMERAS}
    return config.Env.model_validate({**chosen, **changes})


def refusal(suite: str, name: str, strength: float, file: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        registry.check(env(suite), [name], [strength], file)
    return str(caught.value)


def test_what_cannot_be_done_is_said_by_name() -> None:
    assert "fake cannot do camera_viewpoints: it can do action_delay, action_noise" in refusal(
        "fake", "camera_viewpoints", 1.0
    )
    assert "fake cannot do gripper_slips" in refusal("fake", "gripper_slips", 1.0)
    assert "there is no perturbation 'fog'; there are camera_viewpoints" in refusal("fake", "fog", 1.0)
    assert "action_noise has the strength 6, which is out of range" in refusal("fake", "action_noise", 6.0)
    assert "action_noise has the strength -1" in refusal("fake", "action_noise", -1.0)
    assert "action_delay has the strength 1.5, but its strengths are whole" in refusal("fake", "action_delay", 1.5)
    assert "paraphrases miss the task near: there are 3, and strength 4" in refusal("fake", "language_instructions", 4)
    assert "has no paraphrases of the instructions of libero_90" in refusal("libero_90", "language_instructions", 1)


@pytest.mark.parametrize(
    "suite", ["libero_mini", "libero_spatial", "libero_object", "libero_goal", "libero_10", "fake"]
)
def test_every_task_of_a_suite_that_papers_report_has_three_paraphrases_of_its_own(suite: str) -> None:
    registry.check(env(suite), ["language_instructions"], [1.0, 2.0, 3.0], None)
    sentences = paraphrases.read(suite, None)
    tasks = {task.name: task.language for task in envs.tasks(env(suite))}
    assert sentences.keys() == tasks.keys(), "no sentence is of another task"
    told = [*tasks.values(), *(sentence for own in sentences.values() for sentence in own)]
    assert len(set(told)) == 4 * len(tasks)
    limit = MAX_WORDS["mini_pixels" if suite in ("libero_mini", "fake") else "libero_pixels"]
    assert not [sentence for sentence in told if len(re.findall(r"\w+", sentence)) > limit], "as many as policies read"


def test_a_list_of_paraphrases_that_misses_a_task_is_refused_by_the_task(tmp_path: Path) -> None:
    file = tmp_path / "words.yaml"
    file.write_text("near: [go there]\n")
    assert "miss the task far: there are 0" in refusal("fake", "language_instructions", 1.0, str(file))
    broken = tmp_path / "broken.yaml"
    broken.write_text("near: go there\n")
    assert "is not a list of sentences for every task" in refusal("fake", "language_instructions", 1.0, str(broken))
    blank = tmp_path / "blank.yaml"
    blank.write_text("near: ['  ']\nfar: [go far]\n")
    assert "is not a list of sentences for every task" in refusal("fake", "language_instructions", 1.0, str(blank))
    for nothing in (tmp_path, tmp_path / "nothing.yaml"):
        told = f"robustness.paraphrases in params.yaml is {nothing}, which is no file"
        assert told in refusal("fake", "language_instructions", 1.0, str(nothing))


def test_a_suite_without_a_model_to_change_refuses_a_scene_when_it_is_asked_for_one() -> None:
    fleet = FAKE.make_fleet(FAKE.tasks()[0], DEFAULT, config.Cameras(names=(), size=16, shadows=False))
    with pytest.raises(SimulatorError, match="fake cannot do object_sizes"):
        perturbed(fleet, request(("object_sizes", 1.0), task="near"))


def test_a_real_robot_is_never_perturbed() -> None:
    assert registry.of_suite("robot") == []


def test_only_what_a_policy_can_notice_is_played_unless_it_is_named() -> None:
    blind = registry.reaching(env("libero_mini"), ["egocentric", "task"])
    assert not set(PIXELS) & set(blind) and "language_instructions" not in blind
    assert registry.reaching(env("libero_mini"), ["agentview", "instruction"]) == registry.names()


def test_the_page_has_a_row_for_every_perturbation_with_its_source() -> None:
    page = (REPOSITORY / "docs" / "robustness.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| [^|]+ \| ([^|]+) \|", page, re.MULTILINE))
    assert rows == {name: registry.find(name).source for name in registry.names()}
