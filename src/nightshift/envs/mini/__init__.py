"""libero_mini: six LIBERO tasks of rising difficulty that need no downloaded assets and simulate fast."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
ASSETS = FOLDER / "assets"
SCENE = ASSETS / "scenes" / "table.xml"

TASKS = {
    "lift_cube": "lift the cube",
    "push_block_to_zone": "push the block to the green zone",
    "place_cube_on_plate": "place the cube on the plate",
    "place_can_in_tray": "place the can in the tray",
    "stack_red_on_blue": "stack the red cube on the blue cube",
    "open_drawer": "open the drawer of the cabinet",
}
"""Task names and instructions, easiest first. Each has bddl/<name>.bddl and init_states/<name>.npz."""


def bddl_file(task: str) -> Path:
    return FOLDER / "bddl" / f"{task}.bddl"


def init_states_file(task: str) -> Path:
    return FOLDER / "init_states" / f"{task}.npz"
