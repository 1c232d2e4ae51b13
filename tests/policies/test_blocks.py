"""Recomputed and compiled networks compute what they compute as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from nightshift.algorithms.sft import DemoBatch
from nightshift.errors import ConfigError
from nightshift.policies.base import Policy
from nightshift.policies.blocks import prepare_network, require_blocks
from nightshift.policies.snapshot import PolicySlot, snapshot
from nightshift.policies.vla import Vla
from tests.policies import examples

Prepare = Callable[[Policy], None]


def as_they_are(_: Policy) -> None:
    """Blocks that nothing has changed."""


compiled_alone = functools.partial(prepare_network, compiled=True)
recomputed_alone = functools.partial(prepare_network, recomputed=True)
both = functools.partial(prepare_network, compiled=True, recomputed=True)
sharded = functools.partial(prepare_network, compiled=True, sharded=True)


def batch(policy: Any, count: int = 6) -> DemoBatch:
    mask = torch.ones(count, examples.CHUNK, dtype=torch.bool)
    return DemoBatch(policy.inputs(examples.observe(count)), examples.demo_actions(count), mask)


def gradients(family: str, prepare: Prepare) -> dict[str, Tensor]:
    policy: Any = examples.make(family)
    prepare(policy)
    of = batch(policy)
    policy.bc_loss(of.inputs, of.actions, of.mask).backward()
    return {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["vla", "openvla-oft tokens"])
def test_recomputed_activations_give_the_same_gradients(family: str) -> None:
    kept, again = gradients(family, as_they_are), gradients(family, recomputed_alone)
    assert all(torch.equal(kept[name], again[name]) for name in kept)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile looks at it
@pytest.mark.parametrize("prepare", [compiled_alone, both])
@pytest.mark.parametrize("family", ["vla", "openvla-oft tokens"])
def test_compiled_blocks_give_the_same_gradients_but_for_rounding(family: str, prepare: Prepare) -> None:
    kept, compiled = gradients(family, as_they_are), gradients(family, prepare)
    assert kept.keys() == compiled.keys()
    for name, gradient in kept.items():
        torch.testing.assert_close(compiled[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile looks at it
def test_blocks_that_are_recomputed_are_compiled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))  # graphs without kernels

    def operations(prepare: Prepare) -> int:
        torch.compiler.reset()
        counters.clear()
        gradients("vla", prepare)
        return int(counters["stats"]["calls_captured"])

    assert operations(compiled_alone) > operations(both) == operations(sharded) > 0, "the whole network, or its blocks"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile looks at it
def test_versions_of_a_policy_share_what_is_compiled_for_batches_of_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    counters.clear()
    slot = PolicySlot(torch.device("cpu"), compile=True)
    for version in range(3):
        policy = slot.load(snapshot(examples.make("vla"), version))
        for count in (6, 4, 7, 5, 1):
            with torch.inference_mode():
                policy.greedy(policy.inputs(examples.observe(count)))
    assert counters["stats"]["unique_graphs"] == 3, "the first size, all others, and a single decision"


def test_compiling_changes_no_name_of_a_weight() -> None:
    policy = examples.make("vla")
    before = list(policy.state_dict())
    compiled_alone(policy)
    assert list(policy.state_dict()) == before


def test_a_policy_without_blocks_is_refused_with_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"machine\.compile is on, and the policy family gaussian_mlp has no"):
        require_blocks(examples.make("gaussian_mlp"), "machine.compile")


def test_recomputing_keeps_fewer_activations() -> None:
    def saved(prepare: Prepare) -> int:
        policy: Any = Vla(**{**examples.VLA, "depth": 4, "head": "gaussian"})
        policy.normalise_by(examples.STATISTICS)
        prepare(policy)
        of = batch(policy)
        sizes: list[int] = []

        def keep(tensor: Tensor) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            policy.bc_loss(of.inputs, of.actions, of.mask)
        return sum(sizes)

    assert saved(recomputed_alone) < 0.6 * saved(as_they_are)
