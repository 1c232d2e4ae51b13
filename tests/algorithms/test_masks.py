"""Padding has no influence on a loss or a gradient, whatever it holds: zeros, NaN or infinity."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nightshift.algorithms.batch import DecisionBatch, collate
from nightshift.algorithms.objectives import RatioLevel, elements
from tests.algorithms import test_on_policy as on_policy

PADDING = [float("nan"), float("inf"), float("-inf"), 1e38]
BLOCK = 2
"""Decisions at the end of the batch that are padding as a whole."""


def padded_batch(padding: float) -> DecisionBatch:
    """Episodes whose last chunks are cut short, and whole decisions after them, with `padding` where masked."""
    actor = on_policy.policy()
    batch = collate(actor, [e for group in on_policy.groups(actor, *on_policy.MIXED) for e in group])
    batch = batch.with_advantages(torch.linspace(-1, 1, len(batch)), returns=torch.linspace(0, 1, len(batch)))
    mask = batch.mask.clone()
    mask[-BLOCK:] = False
    action, decision = mask[..., None], mask.any(dim=1)
    assert not mask[:-BLOCK].all(), "no chunk is cut short"
    return replace(
        batch,
        mask=mask,
        inputs={name: torch.where(decision[:, None], seen, padding) for name, seen in batch.inputs.items()},
        critic_features=torch.where(decision[:, None], batch.inputs["state"], padding),
        actions=torch.where(action, batch.actions, padding),
        log_probs=torch.where(action, batch.log_probs, padding),
        advantages=torch.where(decision, batch.advantages, padding),
        returns=torch.where(decision, batch.returns, padding),
    )


def updated(padding: float, **changes: Any) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Weights, Adam's moments of all gradients, and the metrics with the losses, after two updates."""
    torch.manual_seed(0)  # for the critic
    learner = on_policy.make_learner(on_policy.policy(), on_policy.settings(**changes), microbatch_size=5)
    metrics = [learner.update_on(padded_batch(padding), progress) for progress in (0.0, 0.5)]
    return learner.tensors(), metrics


@pytest.mark.parametrize("level", ["token", "action", "chunk"])
@pytest.mark.parametrize(("aggregation", "old"), [("step", "rollout"), ("episode", "recomputed")])
def test_an_update_is_bit_for_bit_the_one_with_zeros_in_the_padding(level: str, aggregation: str, old: str) -> None:
    changes: dict[str, Any] = {
        "epochs": 1,
        "advantage_estimator": "gae",
        "ratio_level": level,
        "loss_aggregation": aggregation,
        "old_log_probs": old,
        "kl.coef": 0.5,
        "learn_std": True,
        "entropy_coef": 0.1,
        "clip.dual": 3.0,
    }
    expected, expected_metrics = updated(0.0, **changes)
    for padding in PADDING:
        tensors, metrics = updated(padding, **changes)
        assert metrics == expected_metrics
        assert all(m["update/skipped_steps"] == 0 and m["update/gradients"] > 0 for m in metrics)
        for name, value in expected.items():
            assert torch.equal(tensors[name], value), name


masks = st.integers(1, 4).flatmap(
    lambda c: st.lists(st.lists(st.booleans(), min_size=c, max_size=c), min_size=1, max_size=5)
)


@settings(max_examples=50)
@given(masks, st.sampled_from(PADDING), st.sampled_from(["token", "action", "chunk"]))
def test_elements_and_their_gradients_do_not_see_masked_log_probs(
    mask: list[list[bool]], padding: float, level: RatioLevel
) -> None:
    kept = torch.tensor(mask)
    values = torch.randn(*kept.shape, 7, generator=torch.Generator().manual_seed(0))

    def gradient(filler: float) -> tuple[Tensor, Tensor]:
        log_probs = torch.where(kept[..., None], values, filler).requires_grad_()
        selected, _ = elements(log_probs, kept, level)
        (slope,) = torch.autograd.grad(selected.square().sum(), log_probs)
        return selected.detach(), slope

    for ours, expected in zip(gradient(padding), gradient(0.0), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("padding", PADDING)
def test_the_bc_loss_and_its_gradient_do_not_see_actions_after_the_end(padding: float) -> None:
    def gradients(filler: float) -> list[Tensor]:
        actor, demos = on_policy.policy(), on_policy.demos()
        batch = demos[torch.arange(len(demos))]
        loss = actor.bc_loss(batch.inputs, torch.where(batch.mask[..., None], batch.actions, filler), batch.mask)
        return [loss, *torch.autograd.grad(loss, list(actor.net.parameters()))]

    for ours, expected in zip(gradients(padding), gradients(0.0), strict=True):
        assert torch.equal(ours, expected)
