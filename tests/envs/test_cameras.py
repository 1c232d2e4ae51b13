"""Camera images: what a fleet shows, what its pixels depend on, and what is refused before any work."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nightshift import config, envs
from nightshift.envs.base import Fleet, begin_look
from nightshift.envs.fake import FAKE
from nightshift.envs.libero import cameras as drawing
from nightshift.envs.libero import frames
from nightshift.envs.libero.cameras import averaged
from nightshift.envs.libero.fleet import LiberoFleet
from nightshift.envs.libero.frames import FrameCopies
from nightshift.envs.libero.sketch import sketched
from nightshift.envs.libero.suites import LIBERO_OBJECT
from nightshift.envs.mini.suite import LIBERO_MINI
from nightshift.envs.perturbations.fleet import perturbed
from nightshift.envs.protocols import DEFAULT
from nightshift.errors import SimulatorError
from nightshift.types import PerturbationSpec, RolloutRequest
from tests.envs.test_suites import needs_assets

SIZE = 64
PLAIN = config.Cameras(names=("agentview", "wrist"), size=SIZE, shadows=False)
TASK = LIBERO_MINI.tasks()[4]
CLOSE = 3.0
"""Mean difference in grey levels between images of the same thing."""
DARK = 20
"""Grey levels by which a shadow is darker, at least."""
OTHER_THREAD = (
    "a GL context draws in the thread that made it, and another thread asked for an image",
    "call look, render and camera_images of all fleets of a task from one thread",
)


@pytest.fixture(scope="module")
def fleet() -> Iterator[LiberoFleet]:
    made = LIBERO_MINI.make_fleet(TASK, DEFAULT, PLAIN)
    made.reset("train", [0, 1, 2])
    if made.render(0) is None:
        pytest.skip("no GL library works here")
    yield made
    made.close()


def selected(**changes: Any) -> config.Env:
    chosen = {"suite": "libero_object", "tasks": (), "protocol": "openvla-oft", "horizon": "auto"}
    return config.Env.model_validate({**chosen, "cameras": PLAIN, **changes})


def cameras(**changes: Any) -> config.Cameras:
    return config.Cameras.model_validate({**PLAIN.model_dump(), **changes})


def random_image(size: int) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=np.uint8)


def test_a_fleet_shows_what_a_single_simulation_shows_in_the_same_state_bit_for_bit(fleet: LiberoFleet) -> None:
    fleet.reset("train", [3, 8])
    action = np.full((2, 7), 0.5, np.float32)
    fleet.step(action, np.ones(2, np.bool_))
    seen = fleet.look(np.arange(2), PLAIN.names)
    alone = LIBERO_MINI.make_env(TASK, DEFAULT, PLAIN)
    for lane, state in enumerate((3, 8)):
        alone.reset("train", state)
        alone.step(action[lane])
        for camera, image in alone.camera_images(PLAIN.names).items():
            np.testing.assert_array_equal(seen[camera][lane], image, err_msg=camera)
    alone.close()
    assert {camera: (images.shape, images.dtype.name) for camera, images in seen.items()} == dict.fromkeys(
        PLAIN.names, ((2, SIZE, SIZE, 3), "uint8")
    )
    assert not np.array_equal(seen["agentview"][0], seen["agentview"][1]), "the states look different"


@pytest.mark.parametrize("films_alone", [False, True])
def test_a_sketch_for_people_shows_the_same_with_fewer_faces_and_leaves_the_simulated_model_alone(
    films_alone: bool,
) -> None:
    plain, quick = (LIBERO_MINI.make_fleet(TASK, DEFAULT, PLAIN) for _ in range(2))
    LIBERO_MINI.sketch(quick, films_alone=films_alone)
    with contextlib.closing(plain), contextlib.closing(quick):
        for fleet in (plain, quick):
            fleet.reset("train", [0])
        seen = plain.render(0)
        if seen is None:
            pytest.skip("no GL library works here")
        sketch = quick.render(0)
        assert sketch is not None
        assert 0 < np.abs(sketch.astype(float) - seen).mean() < CLOSE
        ever, now = (fleet.look(np.zeros(1, np.int64), ["agentview"])["agentview"] for fleet in (plain, quick))
        assert np.array_equal(ever, now) == films_alone, "what is recorded is drawn as ever"
        models = [fleet._lanes[0]._model for fleet in (plain, quick)]
        for name in ("mesh_face", "mesh_facenum", "mesh_facenormal"):
            of_plain, of_quick = (getattr(model, name) for model in models)
            np.testing.assert_array_equal(of_plain, of_quick, err_msg=name)
        assert sketched(models[0]).mesh_facenum.sum() < models[0].mesh_facenum.sum() / 2


def test_other_threads_go_on_while_a_cpu_draws(fleet: LiberoFleet) -> None:
    """Software rendering draws in the call that copies a frame; the pilot's simulator must not wait for it."""
    fleet.render(0)
    context = fleet._lanes[0]._renderer._context
    assert context is not None
    copies = FrameCopies(context.mjr, context.calls, 1, [SIZE])
    if context.calls.copying is context.calls.queueing:
        pytest.skip("a GPU draws here")
    turns, ended = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not ended.is_set():
            turns += 1
            time.sleep(0)  # lets the GIL go

    before = sys.getswitchinterval()
    other = threading.Thread(target=count)
    sys.setswitchinterval(1000.0)  # the GIL changes hands only where it is let go
    try:
        other.start()
        started = turns
        for _ in range(1000):
            copies.add(0, view=0)
            if turns > started:
                break
    finally:
        sys.setswitchinterval(before)
        ended.set()
        other.join()
        copies.fetch()
    assert turns > started


@pytest.mark.parametrize("at_once", [1, 2, 5, 6])
def test_images_do_not_depend_on_how_many_are_drawn_at_once(
    fleet: LiberoFleet, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    fleet.reset("train", [0, 1, 2])
    expected = fleet.look(np.arange(3), PLAIN.names)
    monkeypatch.setattr(drawing, "_FRAMES_AT_ONCE", at_once)
    for camera, images in fleet.look(np.arange(3), PLAIN.names).items():
        np.testing.assert_array_equal(images, expected[camera], err_msg=camera)


def test_images_do_not_depend_on_which_simulations_are_drawn_or_in_which_order(fleet: LiberoFleet) -> None:
    fleet.reset("train", [0, 1, 2])
    sibling = fleet.sibling()
    sibling.reset("train", [5])
    every = fleet.look(np.arange(3), PLAIN.names)
    sibling.look(np.zeros(1, np.int64), PLAIN.names)
    some = fleet.look(np.array([2, 0]), PLAIN.names)
    for camera in PLAIN.names:
        np.testing.assert_array_equal(some[camera], every[camera][[2, 0]], err_msg=camera)


@pytest.mark.parametrize("at_once", [2, 32])
def test_looks_that_are_begun_before_others_are_over_show_the_same(
    fleet: LiberoFleet, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Of siblings in one context, of one with other textures there, and of another task's context."""
    monkeypatch.setattr(drawing, "_FRAMES_AT_ONCE", at_once)
    textures = PerturbationSpec(name="background_textures", strength=5.0)
    request = RolloutRequest(
        task=TASK.name, split="train", init_state=1, controller="greedy", seed=0, perturbations=(textures,)
    )
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(contextlib.closing(LIBERO_MINI.make_fleet(LIBERO_MINI.tasks()[0], DEFAULT, PLAIN)))
        textured = stack.enter_context(contextlib.closing(perturbed(fleet, request)))
        fleets: list[Fleet] = [fleet, fleet.sibling(), textured, other]
        for made in fleets:
            made.reset("train", [1, 1])
        alone = [made.look(np.arange(2), PLAIN.names) for made in fleets]
        looks = [begin_look(made, np.arange(2), PLAIN.names) for made in fleets]
        film = fleet.render(0)
        together = [look() for look in looks]
        np.testing.assert_array_equal(film, fleet.render(0))
    for number, (one, both) in enumerate(zip(alone, together, strict=True)):
        for camera in PLAIN.names:
            np.testing.assert_array_equal(both[camera], one[camera], err_msg=f"{camera} of fleet {number}")
    assert not np.array_equal(alone[1]["agentview"], alone[2]["agentview"])


def test_only_the_cameras_that_are_asked_for_are_drawn(fleet: LiberoFleet) -> None:
    fleet.reset("train", [0, 1])
    both = fleet.look(np.arange(2), PLAIN.names)
    one = fleet.look(np.arange(2), ["wrist"])
    assert list(one) == ["wrist"]
    np.testing.assert_array_equal(one["wrist"], both["wrist"])


def test_all_siblings_are_drawn_by_one_context_which_outlives_them(fleet: LiberoFleet) -> None:
    fleet.reset("train", [0])
    sibling = fleet.sibling()
    sibling.reset("train", [0])
    ours, theirs = fleet.look(np.zeros(1, np.int64), PLAIN.names), sibling.look(np.zeros(1, np.int64), PLAIN.names)
    np.testing.assert_array_equal(ours["wrist"], theirs["wrist"])
    assert sibling._lanes[0]._renderer is fleet._lanes[0]._renderer
    sibling.close()
    np.testing.assert_array_equal(fleet.look(np.zeros(1, np.int64), PLAIN.names)["wrist"], ours["wrist"])


def test_an_image_asked_for_by_another_thread_is_refused_with_the_reason(fleet: LiberoFleet) -> None:
    fleet.look(np.zeros(1, np.int64), PLAIN.names)
    caught: list[str] = []

    def look() -> None:
        try:
            fleet.look(np.zeros(1, np.int64), PLAIN.names)
        except SimulatorError as error:
            caught.append(str(error))

    other = threading.Thread(target=look)
    other.start()
    other.join()
    assert caught == [str(SimulatorError(*OTHER_THREAD))]


def test_shadows_change_pixels(fleet: LiberoFleet) -> None:
    fleet.reset("train", [0])
    shaded = LIBERO_MINI.make_fleet(TASK, DEFAULT, cameras(names=("agentview",), shadows=True))
    shaded.reset("train", [0])
    with_shadows = shaded.look(np.zeros(1, np.int64), ["agentview"])["agentview"][0]
    without = fleet.look(np.zeros(1, np.int64), PLAIN.names)["agentview"][0]
    shaded.close()
    assert (without.astype(int) - with_shadows).max() > DARK, "somewhere lies a shadow"


@pytest.mark.slow
def test_a_context_that_another_thread_made_does_not_disturb_the_end_of_the_process() -> None:
    program = """
import threading
from nightshift.envs.mini.suite import LIBERO_MINI
env = LIBERO_MINI.make_env(LIBERO_MINI.tasks()[0])
env.reset("train", 0)
drawing = threading.Thread(target=env.render)
drawing.start()
drawing.join()
env.close()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_reduced_image_is_the_mean_over_areas_rounded_to_the_nearest(size: int) -> None:
    image = random_image(8)
    factor = 8 // size
    means = image.reshape(size, factor, size, factor, 3).mean(axis=(1, 3))
    np.testing.assert_array_equal(averaged(image[None], size)[0], np.floor(means + 0.5).astype(np.uint8))


def test_averaging_a_white_image_does_not_overflow() -> None:
    assert (averaged(np.full((1, 256, 256, 3), 255, np.uint8), 1) == 255).all()


@needs_assets
def test_liberos_own_suites_are_drawn_as_published_and_then_averaged() -> None:
    task = LIBERO_OBJECT.tasks()[0]
    names = ("agentview",)
    published = LIBERO_OBJECT.make_env(task, DEFAULT, cameras(names=names, size="auto"))
    small = LIBERO_OBJECT.make_env(task, DEFAULT, cameras(names=names, size=32))
    published.reset("eval", 0)
    small.reset("eval", 0)
    if published.render() is None:
        pytest.skip("no GL library works here")
    full = published.camera_images(names)["agentview"]
    assert full.shape == (256, 256, 3)
    np.testing.assert_array_equal(small.camera_images(names)["agentview"], averaged(full[None], 32)[0])
    published.close()
    small.close()


def test_libero_mini_is_drawn_at_the_size_that_is_asked_for_and_liberos_suites_as_published() -> None:
    drawn = {
        (suite, size): suite.drawing(DEFAULT, cameras(size=size)).cameras["wrist"]
        for suite, size in ((LIBERO_MINI, 100), (LIBERO_OBJECT, 64), (LIBERO_OBJECT, "auto"))
    }
    assert drawn == {
        (LIBERO_MINI, 100): (100, 100),
        (LIBERO_OBJECT, 64): (256, 64),
        (LIBERO_OBJECT, "auto"): (256, 256),
    }


@pytest.mark.parametrize("at_once", [1, 3, 32])
def test_each_camera_has_its_own_size(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """And shows what it shows where all cameras have that size."""
    monkeypatch.setattr(drawing, "_FRAMES_AT_ONCE", at_once)
    shown = {}
    for sizes in ({"agentview": 64, "wrist": 32}, {"agentview": 64, "wrist": 64}, {"agentview": 32, "wrist": 32}):
        one = LIBERO_MINI.make_fleet(TASK, DEFAULT, cameras(size=sizes))
        with contextlib.closing(one):
            one.reset("train", [0, 1, 2])
            if one.render(0) is None:
                pytest.skip("no GL library works here")
            seen = one.look(np.arange(3), PLAIN.names)
        assert {camera: images.shape for camera, images in seen.items()} == {
            camera: (3, size, size, 3) for camera, size in sizes.items()
        }
        shown[tuple(sizes.values())] = seen
    np.testing.assert_array_equal(shown[64, 32]["agentview"], shown[64, 64]["agentview"])
    np.testing.assert_array_equal(shown[64, 32]["wrist"], shown[32, 32]["wrist"])


def test_what_pixels_depend_on_is_one_number_where_all_cameras_have_the_same() -> None:
    same, other = (
        LIBERO_OBJECT.drawing(DEFAULT, cameras(size=size)).conditions()
        for size in (128, {"agentview": 128, "wrist": "auto"})
    )
    assert (same["resolution"], same["size"]) == (256, 128)
    assert (other["resolution"], other["size"]) == (256, {"agentview": 128, "wrist": 256})
    assert same["cameras"] == other["cameras"] == ["agentview", "wrist"]


@pytest.mark.parametrize(
    ("size", "complaint"),
    [
        ({"agentview": 64}, "size has none for wrist"),
        ({"agentview": 64, "wrist": 64, "side": 64}, "size has one for side: add it to names, or remove it"),
        ({"agentview": 64, "wrist": 0}, "wrist: should be a whole number from 1 on, or auto"),
        (0, "a whole number from 1 on, or auto, or one of these for each camera"),
    ],
)
def test_sizes_that_do_not_fit_the_cameras_are_refused(size: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        cameras(size=size)


def test_an_environment_whose_cameras_have_sizes_of_their_own_can_be_the_key_of_a_cache() -> None:
    one, other = (selected(cameras=cameras(size={"agentview": 64, "wrist": wrist})) for wrist in (32, "auto"))
    again = selected(cameras=cameras(size={"wrist": 32, "agentview": 64}))
    assert {one: 1, other: 2}[again] == 1


def test_a_film_is_drawn_where_no_camera_is_recorded() -> None:
    fleet = LIBERO_MINI.make_fleet(TASK, DEFAULT, cameras(names=()))
    with contextlib.closing(fleet):
        fleet.reset("train", [0])
        picture = fleet.render(0)
    if picture is None:
        pytest.skip("no GL library works here")
    assert picture.shape == (256, 256, 3)


def test_an_error_of_one_look_is_neither_lost_nor_that_of_another(
    fleet: LiberoFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.reset("train", [0, 1])
    lanes = np.arange(2)
    expected = fleet.look(lanes, PLAIN.names)
    before = begin_look(fleet, lanes, PLAIN.names)
    with monkeypatch.context() as broken:
        broken.setattr(frames, "_RGB", 0)
        broken.setattr(frames, "_BGR", 0)
        with pytest.raises(SimulatorError, match="GL reports the error 0x500"):
            begin_look(fleet, lanes, PLAIN.names)
    for camera, images in before().items():
        np.testing.assert_array_equal(images, expected[camera], err_msg=camera)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"names": ("agentview", "sideview")}, "libero_object has no camera sideview; it has agentview, wrist"),
        ({"size": 100}, "images of libero_object are drawn at 256², which cannot be averaged to 100²"),
        ({"size": 512}, "which cannot be averaged to 512²"),
    ],
)
def test_cameras_that_cannot_be_drawn_are_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SimulatorError, match=complaint):
        envs.check_cameras(selected(cameras=cameras(**change)))


@pytest.mark.parametrize(("names", "expected"), [(("agentview",), "no GL library works here"), ((), "fine")])
def test_without_a_gl_library_cameras_are_refused_and_their_absence_is_not(
    names: tuple[str, ...], expected: str
) -> None:
    program = f"""
from nightshift import config, envs
from nightshift.errors import SimulatorError
cameras = config.Cameras(names={names!r}, size=64, shadows=False)
env = config.Env(suite="libero_mini", tasks=(), protocol="openvla-oft", horizon=9, cameras=cameras)
try:
    envs.check_cameras(env)
    print("fine")
except SimulatorError as error:
    print(error)
"""
    environment = {**os.environ, "MUJOCO_GL": "disable"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert expected in done.stdout, done.stderr


def test_conditions_differ_by_size_and_shadows_exactly_where_cameras_are_seen() -> None:
    settings = [cameras(size=size, shadows=shadows) for size in (64, 128) for shadows in (True, False)]
    seen = [str(envs.conditions(selected(cameras=one), ["wrist"])) for one in settings]
    blind = [str(envs.conditions(selected(cameras=one), [])) for one in settings]
    assert (len(set(seen)), len(set(blind))) == (4, 1)


def test_the_fake_camera_shows_the_point_and_the_goal() -> None:
    env = FAKE.make_env(FAKE.tasks()[1], DEFAULT, cameras(names=("agentview",)))
    env.reset("train", 3)
    start = env.camera_images(["agentview"])["agentview"]
    goal = start[..., 0] > 0
    assert goal.sum() == (SIZE // 8) ** 2
    while True:
        offset = env.scene().bodies["goal"].position - env.scene().gripper_position
        action = np.concatenate([np.clip(offset / 0.05, -1, 1), np.zeros(4)]).astype(np.float32)
        if env.step(action).success:
            break
    image = env.camera_images(["agentview"])["agentview"]
    np.testing.assert_array_equal(image[..., 0], start[..., 0], err_msg="the goal stays")
    assert not np.array_equal(image[..., 1], start[..., 1]), "the point has moved"
    assert (goal & (image[..., 1] > 0)).sum() > goal.sum() / 2, "to the goal"
