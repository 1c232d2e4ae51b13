"""Camera images of LIBERO's suites: how many a second with all geoms of a scene, and without those that are not seen.

One JSON line per suite and camera: {suite, camera, all, culled, ratio, faces, faces_seen}. Frames a second are medians
over rounds that take turns, and `least` and `most` are of the ratio. The pixels of both are compared. `--costliest N`
adds the geoms without which a frame takes least time, in ms a frame.

Example: benchmarks/frames.py --suites libero_10 libero_goal --frames 320 --costliest 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
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
        first = self.fleet._lanes[0]
        self.model, self.data = first._model, first._data

    def draw(self, camera: str) -> tuple[float, NDArray[np.uint8]]:
        """Seconds a frame, and the images."""
        started = time.perf_counter()
        images = self.fleet.look(self._lanes, [camera])[camera]
        return (time.perf_counter() - started) / len(images), images

    def faces(self, geoms: Geoms) -> int:
        meshes = self.model.geom_dataid[geoms[self.model.geom_type[geoms] == mujoco.mjtGeom.mjGEOM_MESH.value]]
        return int(self.model.mesh_facenum[meshes].sum())

    def shown(self) -> Geoms:
        geoms: Geoms = (self.model.geom_group != COLLISION_GROUP).nonzero()[0]
        return geoms


@contextmanager
def all_geoms() -> Iterator[None]:
    with patch.object(Culling, "unseen", lambda *_, **__: np.empty(0, np.int64)):
        yield


def compare(scene: Scene, camera: str) -> dict[str, object]:
    rounds = []
    for _ in range(ROUNDS):
        with all_geoms():
            slow, every = scene.draw(camera)
        fast, seen = scene.draw(camera)
        np.testing.assert_array_equal(every, seen)
        rounds.append((slow, fast))
    ratios = [slow / fast for slow, fast in rounds]
    shown = scene.shown()
    unseen = Culling(scene.model).unseen(scene.data, scene.model.camera(CAMERA_NAMES[camera]).id, shadows=True)
    return {
        "all": round(1 / statistics.median(slow for slow, _ in rounds), 1),
        "culled": round(1 / statistics.median(fast for _, fast in rounds), 1),
        "ratio": round(statistics.median(ratios), 2),
        "least": round(min(ratios), 2),
        "most": round(max(ratios), 2),
        "faces": scene.faces(shown),
        "faces_seen": scene.faces(shown) - scene.faces(unseen),
    }


def costliest(scene: Scene, camera: str, count: int) -> list[tuple[str, int, float]]:
    """Geoms by their cost: name, faces, ms a frame that drawing takes less without it."""
    whole = min(scene.draw(camera)[0] for _ in range(ROUNDS))
    costs = []
    for geom in scene.shown().tolist():
        group = scene.model.geom_group[geom]
        scene.model.geom_group[geom] = COLLISION_GROUP
        without = min(scene.draw(camera)[0] for _ in range(ROUNDS))
        scene.model.geom_group[geom] = group
        body = scene.model.body(scene.model.geom_bodyid[geom]).name
        name = scene.model.geom(geom).name or f"a geom of {body}"
        costs.append((name, scene.faces(np.array([geom])), round(1000 * (whole - without), 3)))
    return sorted(costs, key=lambda cost: -cost[2])[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", nargs="+", default=SUITES)
    parser.add_argument("--frames", type=int, default=32, help="of a measurement (default: %(default)s)")
    parser.add_argument("--costliest", type=int, default=0, metavar="N")
    arguments = parser.parse_args()
    for suite in arguments.suites:
        try:
            scene = Scene(suite, arguments.frames)
        except SimulatorError as error:
            print(json.dumps({"suite": suite, "skipped": str(error)}), flush=True)
            continue
        for camera in CAMERA_NAMES:
            scene.draw(camera)
            print(json.dumps({"suite": suite, "camera": camera, **compare(scene, camera)}), flush=True)
            if arguments.costliest:
                for name, faces, ms in costliest(scene, camera, arguments.costliest):
                    row = {"suite": suite, "camera": camera, "geom": name, "faces": faces, "ms": ms}
                    print(json.dumps(row), flush=True)
        scene.fleet.close()


if __name__ == "__main__":
    main()
