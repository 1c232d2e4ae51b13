"""Geoms that are left out of an image: it has the same pixels without them, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
from nightshift.envs.protocols import DEFAULT
from tests.envs.test_suites import needs_assets

SIZE = 64
THINGS = 12
CAMERAS = config.Cameras(names=("agentview", "wrist"), size="auto", shadows=True)
Image = NDArray[np.uint8]
Geoms = NDArray[np.int64]

needs_gl = pytest.mark.skipif(not drawing.works(), reason="no GL library works here")


def world(*, mirrors: int = 1, flat: bool = False, shadows: bool = False) -> mujoco.MjModel:
    """Things, mirrors and a camera that can be put anywhere."""
    mirror = '<geom type="{}" size=".4 .3 .05" material="mirror"/>'.format("plane" if flat else "box")
    thing = '<geom type="ellipsoid" size=".2 .1 .05" rgba="{} .5 .7 1"/>'
    bodies = [mirror] * mirrors + [thing.format(n / THINGS) for n in range(THINGS)]
    return mujoco.MjModel.from_xml_string(f"""
        <mujoco>
          <asset><material name="mirror" reflectance=".7"/></asset>
          <worldbody>
            <light pos="0 0 4" castshadow="{str(shadows).lower()}"/>
            <body mocap="true"><camera name="agentview" fovy="50"/><camera name="robot0_eye_in_hand"/></body>
            {"".join(f'<body mocap="true">{geom}</body>' for geom in bodies)}
            <geom type="box" size=".1 .1 .1" group="0"/>
          </worldbody>
          <default><geom group="1"/></default>
        </mujoco>
    """)


def placed(model: mujoco.MjModel, seed: int) -> mujoco.MjData:
    """The camera first, then mirrors and things: all about the origin."""
    random, data = np.random.default_rng(seed), mujoco.MjData(model)
    data.mocap_pos[:] = random.uniform(-1.5, 1.5, data.mocap_pos.shape)
    data.mocap_quat[:] = random.normal(size=data.mocap_quat.shape)
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
@given(seed=st.integers(0, 2**32), shadows=st.booleans())
def test_an_image_is_the_same_without_what_is_not_seen_in_it_or_in_a_mirror(
    renderers: Callable[[bool], CameraRenderer], seed: int, shadows: bool
) -> None:
    renderer = renderers(shadows)
    data = placed(renderer._model, seed)
    image = drawn(renderer, data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Culling, "unseen", everything)
        np.testing.assert_array_equal(image, drawn(renderer, data))


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


@pytest.mark.parametrize(
    ("scene", "drawn_without_shadows"),
    [
        pytest.param({"shadows": True}, True, id="a light that casts shadows"),
        pytest.param({"mirrors": 2}, True, id="a second mirror, in which MuJoCo draws if the first is gone"),
        pytest.param({"flat": True}, True, id="a plane that mirrors, which may have no end"),
    ],
)
def test_all_is_drawn_where_anything_might_change_a_pixel(scene: dict[str, bool], drawn_without_shadows: bool) -> None:
    model = world(**scene)
    data, culling = placed(model, 0), Culling(model)
    assert not culling.unseen(data, 0, shadows=True).size
    assert bool(culling.unseen(data, 0, shadows=False).size) == drawn_without_shadows


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


def test_the_model_is_as_before_after_a_frame_and_after_an_error() -> None:
    model = world()
    data, culling, groups = placed(model, 0), Culling(model), model.geom_group.copy()
    with pytest.raises(ZeroDivisionError), culling.hidden(data, 0, shadows=False):
        assert (model.geom_group != groups).sum() == len(culling.unseen(data, 0, shadows=False)) > 0
        raise ZeroDivisionError
    np.testing.assert_array_equal(model.geom_group, groups)
