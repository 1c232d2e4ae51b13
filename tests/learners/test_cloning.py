"""Ranks that clone demos make the gradient steps of one process, and resume on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nightshift import config
from nightshift.algorithms.collective import share_out
from nightshift.algorithms.sft import SftSteps
from nightshift.algorithms.strategy import SingleProcess
from nightshift.data import dataset_store
from nightshift.data.episode import Episode
from nightshift.data.schema import Schema
from nightshift.errors import ProjectError
from nightshift.learners import checkpoint, shards
from nightshift.learners.algorithms import Cloning
from nightshift.learners.base import LearnerSpec, LearnerState
from nightshift.learners.checkpoint import Checkpoint
from nightshift.learners.local import LocalLearner
from nightshift.policies.snapshot import snapshot
from tests.data.examples import PROVENANCE, make
from tests.learners import sharded_ranks
from tests.learners.sharded_ranks import Result, Work
from tests.learners.test_fsdp import assert_close, policy_of
from tests.policies import examples

SFT = config.Sft(steps=6, batch_size=5, learning_rate=1e-3, warmup_steps=2)
"""Two ranks have three and two rows of a batch: with two rows per microbatch the second runs one pass for nothing."""
ADAPTED = "openvla-oft tokens + float32 features"
FIRST, REST = SftSteps(2, validate=False), SftSteps(2, validate=True)


def demo(steps: int, seed: int, language: str) -> Episode:
    seen = {name: values for name, values in examples.observe(steps, seed).items() if name in examples.SHAPES}
    seen.pop("instruction")
    actions = examples.demo_actions(steps, seed, horizon=1)[:, 0].numpy()
    provenance = replace(PROVENANCE, init_state=seed, language=language)
    return make(steps=steps, observations=seen, actions=actions, policy_actions=actions.copy(), provenance=provenance)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chunks at the ends of episodes are masked, so that ranks have unequal numbers of actions. There is one validation
    step: where there are several ranks, the others have none."""
    path = tmp_path_factory.mktemp("cloning") / "dataset"
    train = [demo(4, 0, "lift the cube"), demo(6, 1, "open the top drawer"), demo(3, 2, "lift the cube")]
    held = [demo(2, 3, "lift the cube")]
    dataset_store.write(path, {"train": train, "validation": held}, Schema.of(held[0]))
    return path


def make_spec(family: str, dataset: Path, **changes: Any) -> LearnerSpec[SftSteps]:
    spec = LearnerSpec(
        policy=snapshot(examples.make_policy(family)),
        algorithm=Cloning.of(dataset, SFT),
        seed=0,
        microbatch_size=2,
        gradient_checkpointing=False,
        compile=False,
        device=torch.device("cpu"),
        strategy="data_parallel",
        cpu_offload=False,
    )
    return replace(spec, **changes)


def alone(
    spec: LearnerSpec[SftSteps], updates: Sequence[SftSteps], start: LearnerState | None = None
) -> tuple[LearnerState, dict[str, float]]:
    """The state of one process after some updates, and the metrics of the last."""
    learner = LocalLearner(spec)
    if start is not None:
        learner.restore(start)
    metrics = [learner.update([steps]) for steps in updates][-1]
    return learner.state(), metrics


def together(
    spec: LearnerSpec[SftSteps],
    ranks: int,
    updates: Sequence[SftSteps],
    save: Path,
    start: LearnerState | None = None,
) -> tuple[LearnerState, list[Result]]:
    """The state of all ranks after some updates, as a checkpoint would have it."""
    work = Work(spec=spec, updates=[[steps] * ranks for steps in updates], start=start, save=save)
    results = sharded_ranks.run(work)
    state = results[0].state
    return replace(state, tensors=shards.read(save)) if spec.strategy == "fsdp" else state, results


@pytest.mark.parametrize(
    ("family", "strategy", "ranks"),
    [
        ("gaussian_mlp", "data_parallel", 2),
        ("gaussian_mlp", "fsdp", 3),
        ("vla", "fsdp", 2),
        pytest.param("vla", "data_parallel", 3, marks=pytest.mark.slow),
        ("flow sde", "data_parallel", 2),
        pytest.param("flow sde", "fsdp", 3, marks=pytest.mark.slow),
        pytest.param("gaussian_mlp", "fsdp", 1, marks=pytest.mark.slow),
    ],
)
def test_ranks_make_the_gradient_steps_of_one_process(
    family: str, strategy: str, ranks: int, dataset: Path, tmp_path: Path
) -> None:
    """Weights and moments to 1e-5, a hundredth of a step. Augmentation and the draws of the loss are those of one
    process; the moments would show a gradient that is a mean over ranks, which the weights do not."""
    spec = make_spec(family, dataset, strategy=strategy)
    expected, metrics = alone(spec, [FIRST, REST])
    found, results = together(spec, ranks, [FIRST, REST], tmp_path)
    assert_close(found.tensors, expected.tensors)
    assert len({result.microbatches for result in results}) == 1 or strategy == "data_parallel"
    for result in results:
        assert result.metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)
        assert result.state.counters == expected.counters == {"version": 4}


@pytest.mark.slow
def test_sharded_ranks_clone_adapters_of_a_policy_whose_base_is_frozen(dataset: Path, tmp_path: Path) -> None:
    """Also where rollouts record vision features: cloning runs the vision encoder, on images that are augmented."""
    spec = make_spec("gaussian_mlp", dataset, policy=snapshot(policy_of(ADAPTED)), strategy="fsdp")
    expected, metrics = alone(spec, [FIRST])
    found, results = together(spec, 2, [FIRST], tmp_path)
    assert_close(found.tensors, expected.tensors)
    assert results[0].metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    assert any("lora_B" in name for name in found.tensors)


def test_the_draws_of_a_step_follow_from_the_seed(tmp_path: Path) -> None:
    """With one step of one demo every batch is the same, so that draws alone can make a difference."""
    only = [demo(2, 0, "lift the cube")]
    dataset_store.write(tmp_path / "dataset", {"train": only, "validation": []}, Schema.of(only[0]))
    spec = make_spec("flow sde", tmp_path / "dataset")
    first, again, other = (alone(replace(spec, seed=seed), [FIRST])[0].tensors for seed in (0, 0, 1))
    policy = [name for name in first if first[name].is_floating_point()]
    assert all(torch.equal(first[name], again[name]) for name in policy)
    assert any(not torch.equal(first[name], other[name]) for name in policy)


def test_the_order_of_the_demos_is_that_of_one_process_to_the_bit(dataset: Path, tmp_path: Path) -> None:
    spec = make_spec("gaussian_mlp", dataset)
    expected, _ = alone(spec, [FIRST])
    found, _ = together(spec, 3, [FIRST], tmp_path)
    assert torch.equal(found.tensors["generator"], expected.tensors["generator"])


@pytest.mark.parametrize(
    "changes",
    [
        {"cpu_offload": True, "gradient_checkpointing": True},
        pytest.param({"compile": True, "gradient_checkpointing": True}, marks=pytest.mark.slow),
    ],
    ids=",".join,
)
def test_offloading_recomputing_and_compiling_change_nothing(
    changes: dict[str, Any], dataset: Path, tmp_path: Path
) -> None:
    expected, _ = alone(make_spec("vla", dataset), [FIRST])
    found, _ = together(make_spec("vla", dataset, strategy="fsdp", **changes), 2, [FIRST], tmp_path)
    assert_close(found.tensors, expected.tensors)


def test_saved_on_two_ranks_and_resumed_on_one_and_on_three_cloning_ends_as_if_it_had_not_been_interrupted(
    dataset: Path, tmp_path: Path
) -> None:
    """In the middle of the warm-up; saved by FSDP, resumed by one process and by data parallel ranks."""
    spec = make_spec("gaussian_mlp", dataset)
    expected, _ = alone(spec, [FIRST, REST])
    counters: dict[str, float] = {}

    def write(folder: Path) -> dict[str, str]:
        state, results = together(replace(spec, strategy="fsdp"), 2, [FIRST], folder)
        counters.update(state.counters)
        return {name: digest for result in results for name, digest in result.sums.items()}

    checkpoint.save(tmp_path, Checkpoint(step=2, tensors={}, state={}), write)
    saved = checkpoint.newest(tmp_path)
    assert saved is not None
    start = LearnerState(tensors=saved.tensors, counters=counters, shards=saved.shards)
    on_one, _ = alone(spec, [REST], start)
    on_three, _ = together(spec, 3, [REST], tmp_path / "three", start)
    for found in (on_one, on_three):
        assert_close(found.tensors, expected.tensors)
        assert found.counters == expected.counters


def test_a_dataset_that_a_rank_does_not_see_and_another_one_in_its_place_are_named(
    dataset: Path, tmp_path: Path
) -> None:
    policy, there = examples.make_policy("gaussian_mlp"), tmp_path / "dataset"
    cloning = replace(Cloning.of(dataset, SFT), dataset=there)
    with pytest.raises(ProjectError, match=r"reads demos from .*dataset, which its machine does not see"):
        cloning.learner(policy, seed=0, microbatch_size=2, strategy=SingleProcess())
    older = [demo(4, 7, "lift the cube")]
    dataset_store.write(there, {"train": older, "validation": older}, Schema.of(older[0]))
    with pytest.raises(ProjectError, match="which is another dataset on its machine"):
        cloning.learner(policy, seed=0, microbatch_size=2, strategy=SingleProcess())


class OneOf(SingleProcess):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@given(total=st.integers(0, 40), ranks=st.integers(1, 9))
def test_shares_cover_all_samples_in_order_and_differ_by_one_at_most(total: int, ranks: int) -> None:
    parts = [share_out(OneOf(rank, ranks), total) for rank in range(ranks)]
    assert np.concatenate([np.arange(part.start, part.end) for part in parts]).tolist() == list(range(total))
    sizes = [part.end - part.start for part in parts]
    assert max(sizes) - min(sizes) <= 1
