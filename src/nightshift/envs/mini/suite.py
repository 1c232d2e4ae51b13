"""libero_mini: six LIBERO tasks of rising difficulty that need no downloaded assets and simulate fast."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nightshift.envs.base import States, stored_split
from nightshift.envs.libero.problem import Problem
from nightshift.envs.libero.suites import LiberoSuite, load_npz
from nightshift.types import Split, Task

FOLDER = Path(__file__).parent
ASSETS = FOLDER / "assets"
SCENE = ASSETS / "scenes" / "table.xml"
OBJECTS = "nightshift.envs.mini.objects"

TASKS = {
    "lift_cube": "lift the cube",
    "push_block_to_zone": "push the block to the green zone",
    "place_cube_on_plate": "place the cube on the plate",
    "place_can_in_tray": "place the can in the tray",
    "stack_red_on_blue": "stack the red cube on the blue cube",
    "open_drawer": "open the drawer of the cabinet",
}
"""Task names and instructions, easiest first. Each has bddl/<name>.bddl and init_states/<name>.npz."""

ARRAYS = {"train": ("train",), "eval": ("eval", "more_eval")}
"""Arrays of an init_states file that make up each split."""


class MiniSuite(LiberoSuite):
    """It ships training and evaluation states, both at rest, so that an episode needs no steps to settle."""

    name = "libero_mini"

    def instructions(self) -> Mapping[str, str]:
        return TASKS

    def bddl_file(self, task: str) -> Path:
        return FOLDER / "bddl" / f"{task}.bddl"

    def init_states_file(self, task: str) -> Path:
        return FOLDER / "init_states" / f"{task}.npz"

    def load_init_states(self, task: Task, split: Split) -> States:
        remedy = "restore it with git checkout, or make it again with scripts/make_init_states.py"
        return load_npz(self.init_states_file(task.name), ARRAYS[stored_split(split)], remedy)

    def _problem(self, task: str) -> Problem:
        return Problem(bddl=self.bddl_file(task), assets=ASSETS, scene=SCENE, objects=OBJECTS)


LIBERO_MINI = MiniSuite()
