"""A small policy that sees goes through all stages, on the real simulator with its cameras."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from nightshift import config, policies
from nightshift.config import merged
from nightshift.data import dataset_store
from nightshift.envs.mini.suite import LIBERO_MINI
from nightshift.errors import SimulatorError
from nightshift.pipeline.job import Job
from nightshift.project import paths
from nightshift.stages import collect, dataset, evaluate, rloo, sft
from tests.conftest import leave_skipped, small_params
from tests.pipeline.test_precheck import SEEING

CAMERAS = {"agentview": 32, "wrist": 16}
TINY: dict[str, Any] = merged(
    SEEING,
    {
        "policy": {
            **SEEING["policy"],
            "inputs": [*CAMERAS, "proprio", "instruction"],
            "chunk": 20,
        },  # few decisions: drawing takes a third of a second without a GPU
        "env": {
            "suite": "libero_mini",
            "tasks": ["lift_cube"],
            "horizon": 40,
            "cameras": {"names": [*CAMERAS], "size": CAMERAS, "shadows": False},
        },
        "states": {"validation_share": 0.02},
        "collect": {"demos_per_task": 2, "attempts": 4, "disturbance": 0.0},
        "sft": {"steps": 60, "batch_size": 16, "learning_rate": 3.0e-3, "warmup_steps": 2},
        "rloo": {"iterations": 1, "groups": 2, "group_size": 2, "validation": {"level": 0.2}},
        "evaluate": {"init_states": 1, "films": 1},
    },
)


@pytest.fixture
def tiny() -> config.Params:
    try:
        LIBERO_MINI.check_drawing()
    except SimulatorError as error:
        pytest.skip(error.what)
    return config.Params.model_validate(merged(small_params(), TINY))


@pytest.mark.slow
def test_a_policy_that_sees_goes_through_all_stages(job: Callable[[str], Job], tiny: config.Params) -> None:
    collect.run(job("collect"), seed=0, env=tiny.env, states=tiny.states, collect=tiny.collect)
    dataset.run(job("dataset"), seed=0, dataset=tiny.dataset)
    steps = dataset_store.read(paths.DATASET).steps("train", [*CAMERAS, "instruction"])
    seen = steps.observe(np.array([0, 5]))
    for camera, size in CAMERAS.items():
        assert seen[camera].shape == (2, size, size, 3)
        assert seen[camera].dtype == np.uint8
        assert seen[camera][0].std() > 1, "the image is empty"
        assert (seen[camera][0] != seen[camera][1]).any(), "the hand does not move"
    assert seen["instruction"].tolist() == ["lift the cube"] * 2
    sft.run(job("sft"), seed=0, policy=tiny.policy, sft=tiny.sft)
    losses = [json.loads(line) for line in (job("sft").state / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1]["sft/loss"] < 0.9
    rloo.run(job("rloo"), seed=0, env=tiny.env, states=tiny.states, rloo=tiny.rloo)
    leave_skipped("rlpd")
    evaluate.run(job("evaluate"), env=tiny.env, evaluate=tiny.evaluate)
    report = json.loads(paths.EVALUATION_REPORT.read_text())
    assert report["conditions"]["pictures"]["size"] == CAMERAS
    assert policies.load(paths.RLOO_POLICY).observations == [*CAMERAS, "proprio", "instruction"]
    assert [film["candidate"] for film in report["films"]] == ["sft"], "one iteration keeps the clone: one policy acts"
    with Image.open(paths.EVALUATION / Path(report["films"][0]["file"]).with_suffix(".jpg")) as strip:
        assert strip.width == 18 * strip.height, "six stills of the scene and of what both cameras showed beside it"
