"""The head that sorts every action dimension into 256 bins."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from nightshift.policies.heads import BinsHead
from tests.policies.examples import generators

BINS = BinsHead.outputs_per_dim
ROWS, CHUNK, DIMS = 4, 2, 3
SHAPE = (ROWS, CHUNK, DIMS)


@pytest.fixture
def head() -> BinsHead:
    head = BinsHead(DIMS)
    head.normalise_by({"min": [-1.0, 0.0, 0.5], "max": [1.0, 25.6, 0.5]})
    return head


@pytest.fixture
def outputs() -> Tensor:
    return 3 * torch.randn(*SHAPE, BINS, generator=torch.Generator().manual_seed(0))


def centres(head: BinsHead) -> Tensor:
    """The actions of all bins, [BINS, 1, A]."""
    logits = torch.eye(BINS)[:, None, None].expand(BINS, 1, DIMS, BINS)
    return head.greedy(logits)


def test_bins_lie_evenly_between_the_demos_minimum_and_maximum(head: BinsHead) -> None:
    actions = centres(head)[:, 0]
    torch.testing.assert_close(actions[:, 0], torch.linspace(-1 + 1 / BINS, 1 - 1 / BINS, BINS))
    torch.testing.assert_close(actions[:, 1], 0.05 + 0.1 * torch.arange(BINS))


def test_a_dimension_that_the_demos_do_not_move_stays_near_its_value(head: BinsHead) -> None:
    assert (centres(head)[..., 2] - 0.5).abs().max() <= 0.01


def test_the_probabilities_of_all_bins_sum_to_one(head: BinsHead, outputs: Tensor) -> None:
    row = outputs[:1, :1].expand(BINS, 1, DIMS, BINS)
    for temperature in (0.1, 1.0, 5.0):
        total = head.log_prob(row, centres(head), temperature).exp().sum(0)
        torch.testing.assert_close(total, torch.ones(1, DIMS), rtol=0, atol=1e-5)


def test_the_log_prob_of_a_sample_is_the_one_it_was_drawn_with(head: BinsHead, outputs: Tensor) -> None:
    for temperature in (0.1, 1.0, 5.0):
        actions, log_probs = head.sample(outputs, generators(ROWS), temperature)
        assert torch.equal(head.log_prob(outputs, actions, temperature), log_probs)


def test_every_centre_lies_in_its_own_bin_and_actions_beyond_the_range_in_the_nearest(head: BinsHead) -> None:
    logits = torch.arange(float(BINS)).expand(BINS, 1, DIMS, BINS)
    expected = torch.arange(float(BINS)).log_softmax(-1)[:, None, None].expand(BINS, 1, DIMS)
    assert torch.equal(head.log_prob(logits, centres(head), 1.0), expected)
    beyond = torch.tensor([-7.0, -7.0, -7.0]).expand(1, 1, DIMS)
    assert torch.equal(head.log_prob(logits[:1], beyond, 1.0), expected[:1])
    assert torch.equal(head.log_prob(logits[:1], -10 * beyond, 1.0), expected[-1:])


def test_samples_follow_the_probabilities(head: BinsHead) -> None:
    logits = torch.full((1, 1, DIMS, BINS), -1e9)
    logits[..., [3, 40, 41]] = torch.tensor([0.5, 0.3, 0.2]).log()
    draws = 4000
    actions, _ = head.sample(logits.expand(draws, 1, DIMS, BINS), generators(draws), 1.0)
    for index, probability in ((3, 0.5), (40, 0.3), (41, 0.2)):
        share = (actions == centres(head)[index]).float().mean(0)
        torch.testing.assert_close(share, torch.full((1, DIMS), probability), rtol=0, atol=0.03)


def test_no_draw_falls_into_a_bin_without_probability(head: BinsHead) -> None:
    class Extreme(np.random.Generator):
        """Draws the two ends of [0, 1)."""

        def random(self, size: tuple[int, ...], dtype: type[np.float32]) -> np.ndarray:  # type: ignore[override]
            ends = np.array([0, 1 - 2.0**-24], dtype)
            return np.resize(ends, size)

    logits = torch.full((1, 2, DIMS, BINS), -1e9)
    logits[..., 100:103] = 0.1
    _, log_probs = head.sample(logits, [Extreme(np.random.PCG64(0))], 1.0)
    torch.testing.assert_close(log_probs, torch.full((1, 2, DIMS), 1 / 3).log())


def test_samples_approach_the_greedy_action_as_the_temperature_falls(head: BinsHead, outputs: Tensor) -> None:
    greedy = head.greedy(outputs)
    assert not torch.equal(head.sample(outputs, generators(ROWS), 1.0)[0], greedy)
    assert torch.equal(head.sample(outputs, generators(ROWS), 1e-3)[0], greedy)


def test_entropy_is_that_of_the_bins(head: BinsHead, outputs: Tensor) -> None:
    expected = torch.distributions.Categorical(logits=outputs / 0.7).entropy()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(head.entropy(outputs, 0.7), expected)
    uniform = torch.zeros(*SHAPE, BINS)
    torch.testing.assert_close(head.entropy(uniform, 0.7), torch.full(SHAPE, BINS).log())


def test_the_cloning_loss_is_the_cross_entropy_of_the_demos_bins(head: BinsHead, outputs: Tensor) -> None:
    actions = head.sample(outputs, generators(ROWS), 1.0)[0]
    mask = torch.ones(ROWS, CHUNK, dtype=torch.bool)
    mask[0, 1] = False
    expected = -head.log_prob(outputs, actions, 1.0)[mask].mean()
    torch.testing.assert_close(head.bc_loss(outputs, actions, mask), expected)


def test_its_spread_has_no_parameters_of_its_own(head: BinsHead) -> None:
    assert list(head.std_parameters()) == list(head.parameters()) == []
