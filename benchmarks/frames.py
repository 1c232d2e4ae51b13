"""Camera images of LIBERO's suites: how many a second with all geoms of a scene, and without those that are not seen.

One JSON line per suite and view: {suite, cameras, all, culled, ratio, least, most, faces, faces_drawn}. `all` and
`culled` are frames a second, medians over rounds that take turns; `least` and `most` are of their ratio. Faces are
those of meshes in a frame, `faces_drawn` without geoms that are not seen, means over the drawn states. The pixels of
both are compared.

Example: benchmarks/frames.py --suites libero_10 libero_goal --frames 320
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import mujoco
import numpy as np
from numpy.typing import NDArray

# Python looks for modules beside the script first, where benchmarks/libero.py would pass for the package `libero`.
sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parent.resolve()]

from nightshift import config, envs
from nightshift.envs.libero.cameras import CAMERA_NAMES
from nightshift.envs.libero.culling import COLLISION_GROUP, Culling, Geoms
from nightshift.envs.libero.fleet import LiberoFleet
from nightshift.envs.protocols import DEFAULT
from nightshift.errors import SimulatorError

SUITES = ("libero_mini", "libero_spatial", "libero_object", "libero_goal", "libero_10")
CAMERAS = config.Cameras(names=tuple(CAMERA_NAMES), size="auto", shadows=True)
VIEWS = [[camera] for camera in CAMERA_NAMES] + [list(CAMERA_NAMES)]
LANES = 8
ROUNDS = 3


class Scene:
    """The first task of a suite, seen in its first init states."""

    def __init__(self, suite: str, frames: int) -> None:
        chosen = envs.suite(suite)
        fleet = chosen.make_fleet(chosen.tasks()[0], DEFAULT, CAMERAS)
        assert isinstance(fleet, LiberoFleet)
        self.fleet = fleet
        self.fleet.reset("eval", list(range(LANES)))
        self._lanes = np.arange(frames) % LANES
        self._model = self.fleet._lanes[0]._model

    def draw(self, cameras: Sequence[str]) -> tuple[float, Mapping[str, NDArray[np.uint8]]]:
        """Seconds a frame, and the images by camera."""
        started = time.perf_counter()
        images = self.fleet.look(self._lanes, cameras)
        return (time.perf_counter() - started) / (len(self._lanes) * len(cameras)), images

    def faces(self) -> int:
        """Of a frame with all geoms."""
        return self._faces_of((self._model.geom_group != COLLISION_GROUP).nonzero()[0])

    def faces_drawn(self, cameras: Sequence[str]) -> float:
        """Of a frame, on average."""
        culling = Culling(self._model)
        views = [self._model.camera(CAMERA_NAMES[camera]).id for camera in cameras]
        unseen = [culling.unseen(lane._data, view, shadows=True) for lane in self.fleet._lanes for view in views]
        return self.faces() - statistics.mean(self._faces_of(geoms) for geoms in unseen)

    def _faces_of(self, geoms: Geoms) -> int:
        meshes = self._model.geom_dataid[geoms[self._model.geom_type[geoms] == mujoco.mjtGeom.mjGEOM_MESH.value]]
        return int(self._model.mesh_facenum[meshes].sum())


@contextmanager
def all_geoms() -> Iterator[None]:
    with patch.object(Culling, "unseen", lambda *_, **__: np.empty(0, np.int64)):
        yield


def compare(scene: Scene, cameras: Sequence[str]) -> dict[str, object]:
    rounds = []
    for _ in range(ROUNDS):
        with all_geoms():
            slow, every = scene.draw(cameras)
        fast, seen = scene.draw(cameras)
        for camera in cameras:
            np.testing.assert_array_equal(every[camera], seen[camera])
        rounds.append((slow, fast))
    ratios = [slow / fast for slow, fast in rounds]
    return {
        "all": round(1 / statistics.median(slow for slow, _ in rounds), 1),
        "culled": round(1 / statistics.median(fast for _, fast in rounds), 1),
        "ratio": round(statistics.median(ratios), 2),
        "least": round(min(ratios), 2),
        "most": round(max(ratios), 2),
        "faces": scene.faces(),
        "faces_drawn": round(scene.faces_drawn(cameras)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", nargs="+", default=SUITES)
    parser.add_argument(
        "--frames", type=int, default=32, help="of each camera, in a measurement (default: %(default)s)"
    )
    arguments = parser.parse_args()
    for suite in arguments.suites:
        try:
            scene = Scene(suite, arguments.frames)
        except SimulatorError as error:
            print(json.dumps({"suite": suite, "skipped": str(error)}), flush=True)
            continue
        for cameras in VIEWS:
            scene.draw(cameras)
            print(json.dumps({"suite": suite, "cameras": cameras, **compare(scene, cameras)}), flush=True)
        scene.fleet.close()


if __name__ == "__main__":
    main()
