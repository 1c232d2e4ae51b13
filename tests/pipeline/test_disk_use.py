"""What training writes is told before it runs: never less than real stages write, and hardly more."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nightshift import config
from nightshift.config import merged
from nightshift.learners import checkpoint
from nightshift.pipeline import disk_use, precheck
from nightshift.pipeline.disk_use import DiskUse
from nightshift.pipeline.job import Job
from nightshift.project import paths
from nightshift.stages import collect, dataset, rloo, rlpd, sft
from tests.conftest import small_params
from tests.policies.openvla_oft import tiny
from tests.stages import test_rlpd

FEW_STEPS = {"sft": {"steps": 3}, "machine": {"checkpoint_every": {"sft_steps": 1, "rloo_iterations": 1}}}
WIDE = {"policy": {"hidden": [1024, 1024]}}
"""A checkpoint of it is large beside all that is no tensor."""


@pytest.fixture
def project(project_without_code: Path) -> Path:
    return project_without_code


def chosen(*changes: dict[str, Any]) -> config.Params:
    raw = merged(small_params(), merged(FEW_STEPS, WIDE))
    for change in changes:
        raw = merged(raw, change)
    return config.Params.model_validate(raw)


def clone(job: Callable[[str], Job], params: config.Params) -> None:
    collect.run(job("collect"), seed=params.seed, env=params.env, states=params.states, collect=params.collect)
    dataset.run(job("dataset"), seed=params.seed, dataset=params.dataset)
    sft.run(on(job("sft"), params), seed=params.seed, policy=params.policy, sft=params.sft)


def on(job: Job, params: config.Params) -> Job:
    return replace(job, machine=params.machine)


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """By stage, the bytes of all checkpoints when they are most: before an old one is removed."""
    found: dict[str, int] = {}
    real = shutil.rmtree

    def measured(path: Path, *arguments: Any, **named: Any) -> None:
        if Path(path).name.startswith("step-"):
            state = Path(path).parent
            stage = state.parent.name
            found[stage] = max(found.get(stage, 0), checkpoint.size_on_disk(state))
        real(path, *arguments, **named)

    monkeypatch.setattr(shutil, "rmtree", measured)
    return found


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def assert_told(use: DiskUse, peak: int) -> None:
    assert use.checkpoints == 3
    assert peak <= use.to_come <= 1.1 * peak
    written = size(paths.MODELS / use.stage)
    assert written <= use.policy <= 1.1 * written


def test_cloning_writes_as_many_bytes_as_told(project: Path, job: Callable[[str], Job], peaks: dict[str, int]) -> None:
    params = chosen()
    told = disk_use.of_stage("sft", precheck._weightless(params), params)
    clone(job, params)
    assert_told(told, peaks["sft"])


@pytest.mark.parametrize(
    ("changes", "machine"),
    [
        ({}, {}),
        pytest.param({"sampling": {"staleness": 1}}, {}, marks=pytest.mark.slow, id="a policy plays ahead"),
        pytest.param(
            {"advantage_estimator": "gae", "critic": {"hidden": [1024, 1024]}, "learn_std": False},
            {},
            marks=pytest.mark.slow,
            id="a critic",
        ),
        pytest.param({}, {"ranks": 2, "strategy": "fsdp"}, marks=pytest.mark.slow, id="two sharded ranks"),
    ],
)
def test_rloo_writes_as_many_bytes_as_told(
    project: Path,
    job: Callable[[str], Job],
    peaks: dict[str, int],
    changes: dict[str, Any],
    machine: dict[str, Any],
) -> None:
    """The best policy is that of the fourth update, and others act when the sixth to eighth checkpoint are written."""
    settings = {"iterations": 9, "validation": {"every": 4}}
    params = chosen({"rloo": merged(settings, changes)}, {"machine": machine})
    told = disk_use.of_stage("rloo", precheck._weightless(params), params)
    clone(job, chosen())
    rloo.run(on(job("rloo"), params), seed=params.seed, env=params.env, states=params.states, rloo=params.rloo)
    assert_told(told, peaks["rloo"])


@pytest.mark.parametrize("staleness", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_rlpd_writes_as_many_bytes_as_told(
    project: Path, job: Callable[[str], Job], peaks: dict[str, int], staleness: int
) -> None:
    often = {"staleness": staleness, "validation": {"every": 1}}
    params = chosen(
        {"policy": {"head": "tanh_gaussian"}, "rlpd": merged(test_rlpd.SMALL, often)},
        {"machine": {"checkpoint_every": {"rlpd_decisions": 1}}},
    )
    told = disk_use.of_stage("rlpd", precheck._weightless(params), params)
    clone(job, params)
    rlpd.run(on(job("rlpd"), params), seed=params.seed, env=params.env, states=params.states, rlpd=params.rlpd)
    assert_told(told, peaks["rlpd"])


@pytest.mark.parametrize(("every", "count"), [(1, 3), (2, 2), (3, 1), (4, 1)])
def test_three_steps_write_no_more_checkpoints_than_there_are_periods(every: int, count: int) -> None:
    params = chosen({"machine": {"checkpoint_every": {"sft_steps": every}}})
    assert disk_use.of_stage("sft", precheck._weightless(params), params).checkpoints == count


def test_policies_stay_and_checkpoints_go_with_their_stage() -> None:
    first = DiskUse(stage="sft", policy=10, checkpoint=100, checkpoints=3)
    second = DiskUse(stage="rloo", policy=10, checkpoint=50, checkpoints=3)
    assert disk_use.most_at_once([first, second]) == 310
    assert disk_use.most_at_once([replace(first, checkpoints=0), second]) == 170
    assert disk_use.most_at_once([replace(first, checkpoints=0), replace(second, written=100)]) == 70
    assert disk_use.most_at_once([replace(second, written=200)]) == 10


def test_adapters_are_in_policies_beside_the_base_and_in_checkpoints_alone() -> None:
    whole, adapters = (seeing(lora=lora) for lora in (None, {"rank": 2, "alpha": 4.0, "targets": ["q_proj", "v_proj"]}))
    assert adapters.checkpoint < whole.checkpoint
    assert adapters.policy > whole.policy


def seeing(**policy: Any) -> DiskUse:
    raw = merged(small_params(), {**FEW_STEPS, "env": {"cameras": {"names": ["agentview"], "size": 32}}})
    params = config.Params.model_validate({**raw, "policy": tiny.section(**policy)})
    return disk_use.of_stage("sft", precheck._weightless(params), params)
