"""Image preprocessing gives the pixels that TensorFlow gives."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from nightshift.policies.openvla_oft import images, jpeg
from tests.policies.openvla_oft import golden

PIXELS = 1e-4
"""Share that may be off by one level."""


def stage(name: str) -> Tensor:
    chain = golden.arrays("image_chain")
    return torch.from_numpy(np.stack([chain[f"{name}_0"], chain[f"{name}_1"]]))


def errors(found: Tensor, name: str) -> Tensor:
    return (found.int() - stage(name).int()).abs()


def test_a_jpeg_round_trip_is_tensorflows_to_the_bit() -> None:
    assert errors(jpeg.round_trip(stage("input")), "after_jpeg").max() == 0


@pytest.mark.parametrize(
    ("step", "before", "after"),
    [
        (lambda i: images.lanczos(i, 224), "after_jpeg", "after_resize"),
        (images.centre_crop, "after_resize", "after_crop"),
        (lambda i: images.jpeg_lanczos_crop(i, 224), "input", "after_crop"),
    ],
    ids=["lanczos", "crop", "whole chain"],
)
def test_each_step_and_the_whole_chain_are_tensorflows(
    step: Callable[[Tensor], Tensor], before: str, after: str
) -> None:
    wrong = errors(step(stage(before)), after)
    assert wrong.max() <= 1
    assert (wrong > 0).float().mean() < PIXELS


def pil_round_trip(images: Tensor) -> Tensor:
    def one(image: Tensor) -> Tensor:
        file = io.BytesIO()
        Image.fromarray(image.numpy()).save(file, "JPEG", quality=95, subsampling=2)
        return torch.from_numpy(np.array(Image.open(file)))

    return torch.stack([one(image) for image in images])


@pytest.mark.parametrize(
    ("wrong", "before", "after"),
    [
        (pil_round_trip, "input", "after_jpeg"),
        (lambda i: images.bicubic(i, 224), "after_jpeg", "after_resize"),
        (lambda i: i, "after_resize", "after_crop"),
        (lambda i: images.centre_crop(images.lanczos(i, 224)), "input", "after_crop"),
    ],
    ids=["another decoder", "bicubic", "no crop", "no JPEG"],
)
def test_another_step_in_its_place_is_seen(wrong: Callable[[Tensor], Tensor], before: str, after: str) -> None:
    assert (errors(wrong(stage(before)), after) > 0).float().mean() > 10 * PIXELS


def test_bicubic_leaves_images_of_the_right_size_as_they_are() -> None:
    assert torch.equal(images.bicubic(stage("after_crop"), 224), stage("after_crop"))
    assert images.bicubic(stage("input"), 112).shape == (2, 112, 112, 3)


def test_an_image_does_not_depend_on_those_beside_it() -> None:
    together = images.jpeg_lanczos_crop(stage("input"), 224)
    assert torch.equal(images.jpeg_lanczos_crop(stage("input")[1:], 224), together[1:])


@pytest.mark.parametrize("preprocess", images.PREPROCESSING.values(), ids=images.PREPROCESSING.keys())
def test_every_step_is_on_the_device_of_the_images(preprocess: Callable[[Tensor, int], Tensor]) -> None:
    """The meta device computes nothing, and refuses to mix devices as a GPU does."""
    prepared = preprocess(torch.empty((2, 256, 256, 3), dtype=torch.uint8, device="meta"), 224)
    assert (prepared.device.type, tuple(prepared.shape)) == ("meta", (2, 224, 224, 3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_pixels_are_tensorflows() -> None:
    wrong = errors(images.jpeg_lanczos_crop(stage("input").cuda(), 224).cpu(), "after_crop")
    assert wrong.max() <= 1
    assert (wrong > 0).float().mean() < PIXELS
