"""Random shifts and colours of camera images."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nightshift.policies.augmentation import DRAWS, augment, augment_cameras, recolour, shift
from tests.policies.examples import make, observe

IMAGES = torch.from_numpy(observe(4)["agentview"])


def draws(count: int = 4, seed: int = 0, cameras: int = 1) -> Tensor:
    return torch.rand(count, DRAWS * cameras, generator=torch.Generator().manual_seed(seed))


def test_images_keep_their_shape_and_type() -> None:
    changed = augment(IMAGES, crop=4, jitter=0.3, draws=draws())
    assert (changed.shape, changed.dtype) == (IMAGES.shape, torch.uint8)
    assert not torch.equal(changed, IMAGES)


def test_without_crop_and_jitter_nothing_changes() -> None:
    assert torch.equal(augment(IMAGES, crop=0, jitter=0.0, draws=draws()), IMAGES)


def test_an_image_changes_by_its_own_draws_whatever_is_beside_it() -> None:
    whole = augment(IMAGES, 4, 0.3, draws())
    parts = [augment(IMAGES[rows], 4, 0.3, draws()[rows]) for rows in (slice(0, 1), slice(1, 4))]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(augment(IMAGES, 4, 0.3, draws(seed=1)), whole)


@pytest.mark.parametrize(("crop", "jitter"), [(4, 0.0), (0, 0.3)])
def test_equal_images_of_a_batch_change_differently(crop: int, jitter: float) -> None:
    changed = augment(IMAGES[:1].expand(8, -1, -1, -1), crop, jitter, draws(8))
    assert len({image.numpy().tobytes() for image in changed}) > 4


def test_a_crop_is_an_exact_shift_with_a_repeated_border() -> None:
    down, right = 3, -2
    (moved,) = shift(IMAGES[:1], torch.tensor([[down], [right]]))
    image = IMAGES[0]
    assert torch.equal(moved[:-down, -right:], image[down:, :right])
    assert torch.equal(moved[-down:, -right:], image[-1:, :right].expand(down, -1, -1))
    assert torch.equal(moved[:-down, :-right], image[down:, :1].expand(-1, -right, -1))


def test_shifts_reach_the_whole_range_and_no_further() -> None:
    column = torch.arange(100, 121, dtype=torch.uint8)[None, :, None, None].expand(400, -1, 21, 3)
    centres = augment(column, crop=2, jitter=0.0, draws=draws(400))[:, 10, 10, 0]
    assert set(centres.tolist()) == {108, 109, 110, 111, 112}


def grey_of(images: Tensor) -> Tensor:
    return images.float() @ torch.tensor([0.299, 0.587, 0.114])


def test_brightness_contrast_and_saturation_scale_what_they_are_named_for() -> None:
    images = 100 + IMAGES % 50  # far from black and white, where values are clipped
    one = torch.ones(len(images))
    bright = recolour(images, torch.stack([1.2 * one, one, one]))
    torch.testing.assert_close(bright.float(), 1.2 * images, rtol=0, atol=0.51)
    contrast, grey = recolour(images, torch.stack([one, 0.5 * one, one])), grey_of(images)
    torch.testing.assert_close(grey_of(contrast).std((1, 2)), 0.5 * grey.std((1, 2)), rtol=0.02, atol=0)
    torch.testing.assert_close(grey_of(contrast).mean((1, 2)), grey.mean((1, 2)), rtol=0, atol=0.51)
    faded = recolour(images, torch.stack([one, one, 0 * one]))
    assert torch.equal(faded, grey.round().byte()[..., None].expand_as(faded))


def test_colours_are_clipped_and_do_not_wrap_around() -> None:
    white = torch.full((1, 4, 4, 3), 250, dtype=torch.uint8)
    assert (recolour(white, torch.tensor([[1.5], [1.0], [1.0]])) == 255).all()


@pytest.mark.parametrize("family", ["cnn", "vla"])
def test_a_policy_augments_its_cameras_differently_and_nothing_else(family: str) -> None:
    policy = make(family)
    observations = observe(4)
    inputs = policy.inputs({**observations, "wrist": observations["agentview"]})
    changed = policy.augment(inputs, draws(cameras=2))
    assert not torch.equal(changed["agentview"], changed["wrist"])
    assert changed.keys() == inputs.keys()
    for name in inputs.keys() - {"agentview", "wrist"}:
        assert torch.equal(changed[name], inputs[name])
    assert policy.greedy(changed).isfinite().all()


def test_a_smaller_camera_is_shifted_by_the_same_share_of_its_image() -> None:
    shown = {"agentview": 128, "wrist": 64}
    columns = {
        name: torch.arange(size, dtype=torch.uint8)[None, None, :, None].expand(200, size, size, 3)
        for name, size in shown.items()
    }
    changed = augment_cameras(columns, shown, draws(200, cameras=2), crop=6, jitter=0.0)
    moved = {name: changed[name][:, 0, size // 2, 0].int() - size // 2 for name, size in shown.items()}
    assert {name: int(by.abs().max()) for name, by in moved.items()} == {"agentview": 6, "wrist": 3}


def test_a_policy_that_does_not_see_augments_nothing() -> None:
    policy = make("gaussian_mlp")
    inputs = policy.inputs(observe(4))
    assert policy.augment(inputs, torch.zeros(4, policy.augmentation_draws)) is inputs
