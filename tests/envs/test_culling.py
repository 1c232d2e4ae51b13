"""Geoms that are left out of an image: it has the same pixels without them, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mujoco
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nightshift import config
from nightshift.envs.base import Drawing, Pixels
from nightshift.envs.libero import cameras as drawing
from nightshift.envs.libero.cameras import CameraRenderer
from nightshift.envs.libero.culling import Culling
from nightshift.envs.libero.suites import LIBERO_GOAL, LIBERO_OBJECT, LiberoSuite
from nightshift.envs.mini.suite import LIBERO_MINI
from nightshift.envs.perturbations import registry
from nightshift.envs.perturbations.base import EpisodeKey
from nightshift.envs.protocols import DEFAULT
from nightshift.types import PerturbationSpec
from tests.envs.test_suites import needs_assets

SIZE = 64
THINGS = 24
CAMERAS = config.Cameras(names=("agentview", "wrist"), size="auto", shadows=True)
Image = NDArray[np.uint8]
Geoms = NDArray[np.int64]

needs_gl = pytest.mark.skipif(not drawing.works(), reason="no GL library works here")


def world(
    *, mirrors: int = 1, mirror: str = 'geom type="box"', shadows: bool = False, camera: str = 'fovy="50"'
) -> mujoco.MjModel:
    """Things, mirrors and a camera that can be put anywhere."""
    flat = f'<{mirror} size=".4 .3 .05" material="mirror"/>'
    thing = '<geom type="ellipsoid" size=".2 .1 .05" rgba="{} .5 .7 1"/>'
    bodies = [flat] * mirrors + [thing.format(n / THINGS) for n in range(THINGS)]
    return mujoco.MjModel.from_xml_string(f"""
        <mujoco>
          <asset><material name="mirror" reflectance=".7"/></asset>
          <worldbody>
            <light pos="0 0 4" castshadow="{str(shadows).lower()}"/>
            <body mocap="true"><camera name="agentview" {camera}/><camera name="robot0_eye_in_hand"/></body>
            {"".join(f'<body mocap="true">{geom}</body>' for geom in bodies)}
            <geom type="box" size=".1 .1 .1" group="0"/>
          </worldbody>
          <default><geom group="1"/></default>
        </mujoco>
    """)


def placed(model: mujoco.MjModel, seed: int, *, at_mirror: bool = False) -> mujoco.MjData:
    """The camera first, then mirrors and things: all about the origin. `at_mirror`: the camera looks at the upper side
    of the first mirror."""
    random, data = np.random.default_rng(seed), mujoco.MjData(model)
    data.mocap_pos[:] = random.uniform(-1.5, 1.5, data.mocap_pos.shape)
    data.mocap_quat[:] = random.normal(size=data.mocap_quat.shape)
    mujoco.mj_forward(model, data)
    if at_mirror:
        mirror = model.body_mocapid.tolist().index(1)
        axes, middle = data.xmat[mirror].reshape(3, 3), data.xpos[mirror]
        eye = middle + axes @ random.uniform([-0.5, -0.5, 0.1], [0.5, 0.5, 1.5])
        backwards = eye - middle - axes @ random.uniform([-0.4, -0.3, 0.05], [0.4, 0.3, 0.05])
        mujoco.mju_quatZ2Vec(data.mocap_quat[0], backwards / np.linalg.norm(backwards))
        data.mocap_pos[0] = eye
        mujoco.mj_forward(model, data)
    return data


def drawn(renderer: CameraRenderer, data: mujoco.MjData, camera: str = "agentview") -> Image:
    image: Image = renderer.images([data], 1, [camera])[camera][0]
    return image


def everything(culling: Culling, *_: object, **__: object) -> Geoms:
    """Stands for `Culling.unseen`: the reference draws all geoms."""
    return np.empty(0, np.int64)


@pytest.fixture(scope="module")
def renderers() -> Iterator[Callable[[bool], CameraRenderer]]:
    made = {shadows: CameraRenderer(world(), _of_both(shadows=shadows), SIZE) for shadows in (False, True)}
    yield made.__getitem__
    for renderer in made.values():
        renderer.close()


def _of_both(*, shadows: bool) -> Drawing:
    return Drawing(cameras={"agentview": Pixels(SIZE, SIZE)}, rotated=False, shadows=shadows)


@needs_gl
@settings(max_examples=150)
@given(seed=st.integers(0, 2**32), view=st.sampled_from(["anywhere", "at the mirror", "without shadows"]))
def test_an_image_is_the_same_without_what_is_not_seen_in_it_or_in_a_mirror(
    renderers: Callable[[bool], CameraRenderer], seed: int, view: str
) -> None:
    renderer = renderers(view != "without shadows")
    data = placed(renderer._model, seed, at_mirror=view == "at the mirror")
    image = drawn(renderer, data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Culling, "unseen", everything)
        np.testing.assert_array_equal(image, drawn(renderer, data))


def test_whatever_has_a_point_that_the_mirror_shows_is_drawn() -> None:
    model = world()
    culling, (mirror,), shown = Culling(model), (model.geom_matid >= 0).nonzero()[0], 0
    for seed in range(1000):
        data = placed(model, seed, at_mirror=True)
        things = mirror + 1 + _in_mirror(model, data, mirror).nonzero()[0]
        assert not np.isin(things, culling.unseen(data, 0, shadows=True)).any(), seed
        shown += len(things)
    assert shown > 1000, "the test hardly looks into the mirror"


def _in_mirror(model: mujoco.MjModel, data: mujoco.MjData, mirror: int) -> NDArray[np.bool_]:
    """Of each thing [N]: whether an end of one of its axes is in the image by way of the mirror. The mirror image of
    that point is looked for, where the code has the mirror image of the eye."""
    things = slice(mirror + 1, mirror + 1 + THINGS)
    axes, view, eye = data.geom_xmat[mirror].reshape(3, 3), data.cam_xmat[0].reshape(3, 3), data.cam_xpos[0]
    middle = data.geom_xpos[mirror] + model.geom_size[mirror, 2] * axes[:, 2]
    own = data.geom_xmat[things].reshape(-1, 3, 3) * model.geom_size[things, None]
    ends = data.geom_xpos[things, :, None] + np.concatenate([own, -own], axis=2)  # [N, 3, 6]
    points = (ends.transpose(0, 2, 1) - middle) @ axes
    images, start = points * [1, 1, -1], (eye - middle) @ axes
    share = start[2] / (start[2] - images[..., 2:])
    in_mirror = (abs(start + share * (images - start))[..., :2] < model.geom_size[mirror, :2]).all(axis=-1)
    seen = (middle + images @ axes.T - eye) @ view
    in_image = (abs(seen[..., :2]) < -seen[..., 2:] * np.tan(np.deg2rad(model.cam_fovy[0]) / 2)).all(axis=-1)
    found: NDArray[np.bool_] = ((points[..., 2] > 0) & in_mirror & in_image).any(axis=1)
    return found


def test_what_only_a_mirror_shows_is_drawn() -> None:
    model = world()
    data = mujoco.MjData(model)
    camera, mirror, first, *others = range(2 + THINGS)
    data.mocap_pos[camera], data.mocap_quat[camera] = [0, 0, 1], [1, 0, 0, 0]  # it looks down
    data.mocap_pos[mirror] = [0, 0, -1]
    data.mocap_pos[first] = [0, 0, 1.5]  # behind the camera, above the mirror
    data.mocap_pos[others] = [9, 9, 1]
    mujoco.mj_forward(model, data)
    culling, thing = Culling(model), first - camera  # the camera's body has no geom
    assert thing not in culling.unseen(data, 0, shadows=True)
    assert thing in culling.unseen(data, 0, shadows=False), "no mirror is drawn without shadows"
    assert len(culling.unseen(data, 0, shadows=True)) == THINGS - 1
    data.mocap_quat[mirror] = [0, 1, 0, 0]  # its upper side is turned away
    mujoco.mj_forward(model, data)
    assert thing in culling.unseen(data, 0, shadows=True)
    data.mocap_quat[mirror], data.mocap_pos[mirror] = [1, 0, 0, 0], [5, 0, -1]  # the camera does not see it
    data.mocap_pos[first] = [10, 0, 1]  # where it would be in the mirror
    mujoco.mj_forward(model, data)
    assert thing in culling.unseen(data, 0, shadows=True)


@pytest.mark.parametrize(
    "scene",
    [
        pytest.param({"shadows": True}, id="a light that casts shadows"),
        pytest.param({"mirrors": 2}, id="a second mirror, in which MuJoCo draws if the first is gone"),
        pytest.param({"mirror": 'geom type="plane"'}, id="a plane that mirrors, which may have no end"),
        pytest.param({"mirror": 'site type="box"'}, id="a site that mirrors"),
    ],
)
def test_all_is_drawn_where_anything_might_change_a_pixel(scene: dict[str, Any]) -> None:
    model = world(**scene)
    data, culling = placed(model, 0), Culling(model)
    assert not culling.unseen(data, 0, shadows=True).size
    assert culling.unseen(data, 0, shadows=False).size, "shadows and mirrors are drawn together"


@pytest.mark.parametrize(
    "camera",
    [
        pytest.param('fovy="2" orthographic="true"', id="orthographic"),
        pytest.param('resolution="64 64" sensorsize=".01 .01" focal=".01 .01" principal=".004 0"', id="off its axis"),
    ],
)
def test_all_is_drawn_for_a_camera_that_sees_no_pyramid_about_its_axis(camera: str) -> None:
    model = world(camera=camera)
    data, (own, other) = placed(model, 0), range(2)
    assert not Culling(model).unseen(data, own, shadows=False).size
    assert Culling(model).unseen(data, other, shadows=False).size


@needs_gl
@pytest.mark.parametrize(
    ("suite", "least"),
    [
        pytest.param(LIBERO_GOAL, 0.3, marks=needs_assets, id="libero_goal, where a stove mirrors"),
        pytest.param(LIBERO_OBJECT, 0.3, marks=needs_assets, id="libero_object"),
        pytest.param(LIBERO_MINI, 0.0, id="libero_mini, with shadows"),
    ],
)
def test_scenes_of_the_suites_look_the_same_without_what_is_not_seen(
    suite: LiberoSuite, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`least`: the share of geoms that the wrist's camera does not see, on average over poses of the arm."""
    env = suite.make_env(suite.tasks()[0], DEFAULT, CAMERAS)
    env.reset("eval", 0)
    model, data, renderer = env._model, env._data, env._renderer
    wrist, random, shares = model.camera("robot0_eye_in_hand").id, np.random.default_rng(0), []
    for _ in range(4):
        data.qpos[:7] = env._rest_joints + random.normal(0, 0.3, 7)
        mujoco.mj_forward(model, data)
        images = [drawn(renderer, data, camera) for camera in CAMERAS.names]
        unseen = Culling(model).unseen(data, wrist, shadows=True)
        shares.append(len(unseen) / (model.geom_group != 0).sum())
        with monkeypatch.context() as patch:
            patch.setattr(Culling, "unseen", everything)
            for camera, image in zip(CAMERAS.names, images, strict=True):
                np.testing.assert_array_equal(image, drawn(renderer, data, camera), err_msg=camera)
    assert np.mean(shares) >= least
    env.close()


@needs_gl
@needs_assets
def test_a_perturbed_scene_looks_the_same_after_the_plain_one_was_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    task = LIBERO_GOAL.tasks()[0]
    env = LIBERO_GOAL.make_env(task, DEFAULT, CAMERAS)
    env.reset("eval", 0)
    env.images_of([env], CAMERAS.names)
    names = ("camera_viewpoints", "field_of_view", "object_sizes", "confounding_objects")
    specs = [PerturbationSpec(name=name, strength=5.0) for name in names]
    changes = [registry.find(spec.name)(spec, EpisodeKey(task.name, 0, 0)) for spec in specs]
    perturbed = env.altered(changes, "eval", 0)
    perturbed.reset("eval", 0)
    images = perturbed.images_of([perturbed], CAMERAS.names)
    boxes, plain = perturbed._dress.culling._bounds, env._dress.culling._bounds
    assert not np.array_equal(boxes[: len(plain)], plain), "objects have other sizes"
    monkeypatch.setattr(Culling, "unseen", everything)
    for camera, image in perturbed.images_of([perturbed], CAMERAS.names).items():
        np.testing.assert_array_equal(images[camera], image, err_msg=camera)
    perturbed.close()
    env.close()


def test_the_model_is_as_before_after_a_frame_and_after_an_error() -> None:
    model = world()
    data, culling, groups = placed(model, 0), Culling(model), model.geom_group.copy()
    with pytest.raises(ZeroDivisionError), culling.hidden(data, 0, shadows=False):
        assert (model.geom_group != groups).sum() == len(culling.unseen(data, 0, shadows=False)) > 0
        raise ZeroDivisionError
    np.testing.assert_array_equal(model.geom_group, groups)
