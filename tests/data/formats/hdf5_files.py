"""HDF5 files as LIBERO and robomimic write them, small."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

PROBLEM = {
    "problem_name": "libero_tabletop_manipulation",
    "domain_name": "robosuite",
    "language_instruction": "open the middle drawer of the cabinet",
}
BDDL = "chiliocosm/bddl_files/libero_goal/open_the_middle_drawer_of_the_cabinet.bddl"
ENV_ARGS = {
    "type": 1,
    "env_name": "Lift",
    "env_version": "1.4.1",
    "env_kwargs": {"robots": ["Panda"], "control_freq": 20},
}


def libero_demo(*, steps: int, seed: int, size: int = 8) -> dict[str, Any]:
    """The arrays of one demo; float64 and uint8 as LIBERO has them."""
    random = np.random.default_rng(seed)
    last = np.arange(steps) == steps - 1
    poses = random.standard_normal((steps, 6))
    return {
        "obs/agentview_rgb": random.integers(0, 256, (steps, size, size, 3), np.uint8),
        "obs/eye_in_hand_rgb": random.integers(0, 256, (steps, size, size, 3), np.uint8),
        "obs/ee_states": poses,
        "obs/ee_pos": poses[:, :3],
        "obs/ee_ori": poses[:, 3:],
        "obs/gripper_states": random.standard_normal((steps, 2)),
        "obs/joint_states": random.standard_normal((steps, 7)),
        "actions": random.uniform(-1, 1, (steps, 7)),
        "states": random.standard_normal((steps, 79)),
        "robot_states": random.standard_normal((steps, 9)),
        "rewards": last.astype(np.uint8),
        "dones": last.astype(np.uint8),
    }


def write_libero(path: Path, demos: Mapping[str, Mapping[str, Any]]) -> Path:
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["problem_info"] = json.dumps(PROBLEM)
        data.attrs["bddl_file_name"] = BDDL
        data.attrs["bddl_file_content"] = "(define (problem LIBERO_Tabletop_Manipulation) ...)"
        data.attrs["env_args"] = json.dumps({"type": 1, "env_name": "Libero_Tabletop_Manipulation"})
        data.attrs["num_demos"] = len(demos)
        _fill(data, demos)
    return path


def write_robomimic(path: Path, demos: Mapping[str, Mapping[str, Any]], masks: Mapping[str, list[str]]) -> Path:
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["env_args"] = json.dumps(ENV_ARGS, indent=4)
        _fill(data, demos)
        for name, members in masks.items():
            file[f"mask/{name}"] = np.array([member.encode() for member in members])
    return path


def robomimic_demo(*, steps: int, seed: int, solved: bool = True) -> dict[str, Any]:
    """With next_obs: the observations, moved by one."""
    random = np.random.default_rng(seed)
    seen = {"object": random.standard_normal((steps + 1, 10)), "robot0_eef_pos": random.standard_normal((steps + 1, 3))}
    rewards = np.zeros(steps)
    rewards[-1] = solved
    return {
        **{f"obs/{name}": values[:-1] for name, values in seen.items()},
        **{f"next_obs/{name}": values[1:] for name, values in seen.items()},
        "actions": random.uniform(-1, 1, (steps, 7)),
        "states": random.standard_normal((steps, 32)),
        "rewards": rewards,
        "dones": (np.arange(steps) == steps - 1).astype(np.int64),
    }


def _fill(data: h5py.Group, demos: Mapping[str, Mapping[str, Any]]) -> None:
    for name, arrays in demos.items():
        group = data.create_group(name)
        group.attrs["num_samples"] = len(arrays["actions"])
        group.attrs["model_file"] = "<mujoco/>"
        for place, array in arrays.items():
            group[place] = array
