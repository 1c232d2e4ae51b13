import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from nightshift import config, files, policies
from nightshift.adapters.tracking import JsonlTracker
from nightshift.data import dataset_store
from nightshift.errors import ConfigError, DataError, DeviceError, RolloutError
from nightshift.learners import checkpoint
from nightshift.learners.ranks import RayLearners
from nightshift.pipeline.job import Job
from nightshift.policies.gaussian_mlp import GaussianMlp
from nightshift.project import paths
from nightshift.stages import collect, dataset, sft
from tests.rollouts.parts import run_out_of_memory

FEW = 60
"""Steps where nothing depends on how well the clone has learned."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Demos and dataset of the module's first test, for the others to copy."""
    return tmp_path_factory.mktemp("made")


@pytest.fixture
def data(project: Path, made: Path, job: Callable[[str], Job], params: config.Params) -> None:
    if any(made.iterdir()):
        shutil.copytree(made, project, dirs_exist_ok=True)
        return
    collect.run(job("collect"), seed=params.seed, env=params.env, states=params.states, collect=params.collect)
    dataset.run(job("dataset"), seed=params.seed, dataset=params.dataset)
    for path in (paths.DEMOS, paths.DATASET):
        shutil.copytree(path, made / path)


def with_steps(params: config.Params, steps: int) -> config.Params:
    return params.model_copy(update={"sft": params.sft.model_copy(update={"steps": steps})})


def run(job: Callable[[str], Job], params: config.Params) -> dict[str, torch.Tensor]:
    sft.run(job("sft"), seed=params.seed, policy=params.policy, sft=params.sft)
    weights: dict[str, torch.Tensor] = policies.load(paths.SFT_POLICY).state_dict()
    return weights


@pytest.mark.usefixtures("data")
def test_the_policy_comes_closer_to_the_demos(job: Callable[[str], Job], params: config.Params) -> None:
    run(job, params)
    steps = dataset_store.read(paths.DATASET).steps("train", params.policy.inputs)
    cloned = policies.load(paths.SFT_POLICY).act(steps.observe(np.arange(len(steps.actions))))
    assert np.square(cloned - steps.actions).mean() < 0.3 * np.square(steps.actions).mean()


@pytest.mark.usefixtures("data")
def test_it_is_not_guessed_that_training_starts_from_scratch(job: Callable[[str], Job], params: config.Params) -> None:
    ready = job("sft")
    files.remove_folder(paths.START)
    with pytest.raises(DataError, match="data/champion/start") as refused:
        sft.run(ready, seed=0, policy=params.policy, sft=params.sft)
    assert "nightshift stage start" in refused.value.next_step
    paths.START.mkdir(parents=True)  # as a copy that broke off leaves it
    with pytest.raises(DataError, match="the folder is not complete"):
        sft.run(ready, seed=0, policy=params.policy, sft=params.sft)
    assert not paths.SFT_POLICY.exists()


@pytest.mark.usefixtures("data")
def test_an_observation_that_is_not_there_is_named(job: Callable[[str], Job], params: config.Params) -> None:
    policy = params.policy.model_copy(update={"inputs": ("objects", "camera")})
    with pytest.raises(ConfigError, match=r"policy\.inputs has camera, and the observations are objects"):
        sft.run(job("sft"), seed=0, policy=policy, sft=params.sft)


@pytest.mark.usefixtures("data")
def test_weights_that_do_not_fit_on_the_gpu_are_one_sentence(
    job: Callable[[str], Job], params: config.Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GaussianMlp, "to", run_out_of_memory)
    with pytest.raises(DeviceError, match=r"not enough memory.*\n.*lower the size of the policy"):
        run(job, params)


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize("damaged", [1, 2])
def test_damaged_checkpoints_cost_steps_and_change_no_weight(
    job: Callable[[str], Job], params: config.Params, damaged: int, caplog: pytest.LogCaptureFixture
) -> None:
    """With one the training goes on from the checkpoint before it, with both from the beginning."""
    few = with_steps(params, FEW)
    undisturbed = run(job, few)
    for path in sorted(job("sft").state.glob("step-*"))[-damaged:]:
        (path / checkpoint.TENSORS).write_bytes(b"rubbish")
    resumed = run(job, few)
    goes_on = {
        1: f"goes on from step {FEW - params.machine.checkpoint_every.sft_steps}",
        2: "starts from the beginning",
    }
    assert goes_on[damaged] in caplog.text
    assert all(torch.equal(undisturbed[name], value) for name, value in resumed.items())


@pytest.mark.usefixtures("data")
def test_the_seed_decides_the_weights(job: Callable[[str], Job], params: config.Params) -> None:
    def trained(seed: int) -> dict[str, torch.Tensor]:
        shutil.rmtree(job("sft").state, ignore_errors=True)
        return run(job, with_steps(params, FEW).model_copy(update={"seed": seed}))

    first, again, other = trained(0), trained(0), trained(1)
    assert all(torch.equal(first[name], value) for name, value in again.items())
    assert not torch.equal(first["net.0.weight"], other["net.0.weight"])


@pytest.mark.parametrize(("seconds", "steps"), [(0.0, 20), (0.01, 20), (0.5, 4), (7.0, 1)])
def test_the_progress_of_slow_steps_is_shown_every_few_seconds(seconds: float, steps: int) -> None:
    assert sft._steps_at_once(seconds) == steps


@pytest.mark.usefixtures("data")
def test_how_often_progress_is_shown_changes_no_weight(
    job: Callable[[str], Job], params: config.Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown_after(seconds: float) -> dict[str, torch.Tensor]:
        monkeypatch.setattr(sft, "_SECONDS_BETWEEN_SHOWS", seconds)
        shutil.rmtree(job("sft").state, ignore_errors=True)
        return run(job, with_steps(params, FEW))

    often, seldom = shown_after(0.0), shown_after(1e6)
    assert all(torch.equal(often[name], value) for name, value in seldom.items())


def on_machine(job: Callable[[str], Job], **machine: Any) -> Callable[[str], Job]:
    return lambda stage: replace(job(stage), machine=job(stage).machine.model_copy(update=machine))


@pytest.mark.usefixtures("data", "shared_ray")
def test_cloning_whose_sharded_rank_is_lost_ends_and_resumes_in_one_process_with_the_same_weights(
    job: Callable[[str], Job], params: config.Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = with_steps(params, 6)
    often = on_machine(job, checkpoint_every=config.CheckpointEvery(sft_steps=2, rloo_iterations=1, rlpd_decisions=1))
    expected = run(often, few)
    shutil.rmtree(job("sft").state)
    write = RayLearners.write_shards

    def lose_a_rank_after_writing(learners: RayLearners[Any], folder: Path) -> Mapping[str, str]:
        sums = write(learners, folder)
        ray.kill(learners._ranks[1])
        return sums

    monkeypatch.setattr(RayLearners, "write_shards", lose_a_rank_after_writing)
    with pytest.raises(RolloutError, match=r"weights after update 2\s+→ run again: it resumes"):
        run(on_machine(often, ranks=2, strategy="fsdp"), few)
    assert [path.name for path in job("sft").state.glob("step-*")] == ["step-00000002"]
    resumed = run(often, few)
    assert expected.keys() == resumed.keys()
    for name, value in expected.items():
        torch.testing.assert_close(resumed[name], value, atol=1e-5, rtol=1e-4)


class Stopping(JsonlTracker):
    """Ctrl-C before the second checkpoint is written."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        super().log(metrics, step)
        if step == 4:
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.usefixtures("data", "shared_ray")
@pytest.mark.parametrize("strategy", ["data_parallel", "fsdp"])
def test_two_ranks_clone_as_one_process_does_and_where_they_are_interrupted_to_the_same_bits(
    job: Callable[[str], Job], params: config.Params, strategy: str
) -> None:
    few = with_steps(params, 6)
    often = on_machine(job, checkpoint_every=config.CheckpointEvery(sft_steps=2, rloo_iterations=1, rlpd_decisions=1))
    alone = run(often, few)
    shutil.rmtree(job("sft").state)
    together = on_machine(often, ranks=2, strategy=strategy)
    expected = run(together, few)
    shutil.rmtree(job("sft").state)
    with pytest.raises(KeyboardInterrupt):
        run(lambda stage: replace(together(stage), tracker=Stopping(job(stage).state / "stopped.jsonl")), few)
    assert [path.name for path in job("sft").state.glob("step-*")] == ["step-00000002"]
    resumed = run(together, few)
    for name, value in expected.items():
        assert torch.equal(resumed[name], value), name
        torch.testing.assert_close(value, alone[name], atol=1e-5, rtol=1e-4)


@pytest.mark.usefixtures("data")
def test_more_ranks_than_a_batch_has_demos_are_refused(job: Callable[[str], Job], params: config.Params) -> None:
    ranks = params.sft.batch_size + 1
    with pytest.raises(ConfigError, match=rf"machine\.ranks is {ranks}, and a batch of sft\.batch_size"):
        run(on_machine(job, ranks=ranks), params)
