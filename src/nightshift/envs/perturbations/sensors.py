"""Perturbations of what the sensors say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from nightshift.envs.perturbations.base import Perturbation
from nightshift.types import Observation

STD_PER_LEVEL = 0.004
"""Of state vectors, at strength 1: metres and radians."""
TOLD = "task"
"""A state vector that says which task it is: no sensor reads it."""
SEVERITIES = 2.0
"""Severities of LIBERO-Plus, from 1 to 10, per level."""
PUBLISHED_SIZE = 256
"""Pixels of the images that these severities were made for."""

Image = NDArray[Any]


class SensorNoise(Perturbation):
    """State vectors get Gaussian noise; the images of an episode get one of five degradations."""

    name = "sensor_noise"
    kind = "observation"
    source = "LIBERO-Plus, for images: motion, Gaussian and zoom blur, fog, glass blur"
    summary = f"noise with a standard deviation of {1000 * STD_PER_LEVEL:g} mm; of images one of five degradations"

    def change_observation(self, observation: Observation, steps: NDArray[np.int64]) -> Observation:
        changed = dict(observation)
        vectors = [name for name, values in observation.items() if values.dtype == np.float32 and name != TOLD]
        for number, name in enumerate(vectors):
            noise = [self._noise(number, lane, step, observation[name]) for lane, step in enumerate(steps.tolist())]
            changed[name] = observation[name] + np.float32(STD_PER_LEVEL * self.strength) * np.stack(noise)
        return changed

    def _noise(self, number: int, lane: int, step: int, values: NDArray[Any]) -> NDArray[np.float32]:
        return self.random(number, lane, step).standard_normal(values.shape[1:], dtype=np.float32)

    def change_images(
        self, images: Mapping[str, NDArray[np.uint8]], lanes: NDArray[np.int64], steps: NDArray[np.int64]
    ) -> Mapping[str, NDArray[np.uint8]]:
        degrade = DEGRADATIONS[self.random().integers(len(DEGRADATIONS))]
        return {camera: self._degraded(degrade, pictures, lanes, steps) for camera, pictures in images.items()}

    def _degraded(
        self,
        degrade: Degrade,
        images: NDArray[np.uint8],
        lanes: NDArray[np.int64],
        steps: NDArray[np.int64],
    ) -> NDArray[np.uint8]:
        severity = SEVERITIES * self.strength
        rows = [
            degrade(image.astype(np.float64), severity, self.random(lane, step))
            for image, lane, step in zip(images, lanes.tolist(), steps.tolist(), strict=True)
        ]
        return np.asarray(np.clip(np.stack(rows), 0, 255).astype(np.uint8))


Degrade = Callable[[Image, float, np.random.Generator], Image]
"""An image [S, S, 3] with values from 0 to 255, a severity from 0 to 10, and what is drawn for this image."""


def motion_blur(image: Image, severity: float, random: np.random.Generator) -> Image:
    """The mean along a line of 3.5 pixels per severity, in a direction up to 45° from the horizontal."""
    reach = _pixels(image, 3.5 * severity) / 2
    angle = random.uniform(-np.pi / 4, np.pi / 4)
    offsets = np.linspace(-reach, reach, 2 * int(np.ceil(reach)) + 1)
    copies = [_moved(image, offset * np.sin(angle), offset * np.cos(angle)) for offset in offsets]
    return np.asarray(np.mean(copies, axis=0))


def gaussian_blur(image: Image, severity: float, random: np.random.Generator) -> Image:
    """A standard deviation of one pixel per severity."""
    return _blurred(image, _pixels(image, severity))


def zoom_blur(image: Image, severity: float, random: np.random.Generator) -> Image:
    """The mean of images up to 5 % per severity nearer."""
    size = len(image)
    middle = (size - 1) / 2
    rows, columns = np.indices((size, size)) - middle
    zooms = 1 + 0.05 * severity * np.linspace(0, 1, 12)
    copies = [_sampled(image, rows / zoom + middle, columns / zoom + middle) for zoom in zooms]
    return np.asarray(np.mean(copies, axis=0))


def fog(image: Image, severity: float, random: np.random.Generator) -> Image:
    """White clouds over the image, and less contrast."""
    size = len(image)
    clouds = sum(_cloud(random, size, cells) / cells for cells in (2, 4, 8, 16))
    clouds = np.asarray((clouds - np.min(clouds)) / max(np.ptp(clouds), 1e-9))[..., None]
    density = 0.5 * severity
    return np.asarray((image + 255 * density * clouds) / (1 + density))


def glass_blur(image: Image, severity: float, random: np.random.Generator) -> Image:
    """Pixels moved by up to half a pixel per severity, then blurred a little."""
    size, reach = len(image), _pixels(image, 0.5 * severity)
    rows, columns = np.indices((size, size)) + random.uniform(-reach, reach, (2, size, size))
    return _blurred(_sampled(image, rows, columns), _pixels(image, 0.25 * severity))


DEGRADATIONS: tuple[Degrade, ...] = (motion_blur, gaussian_blur, zoom_blur, fog, glass_blur)


def _pixels(image: Image, published: float) -> float:
    return published * len(image) / PUBLISHED_SIZE


def _blurred(image: Image, sigma: float) -> Image:
    return np.asarray(ndimage.gaussian_filter(image, (sigma, sigma, 0), mode="nearest"))


def _moved(image: Image, rows: float, columns: float) -> Image:
    return np.asarray(ndimage.shift(image, (rows, columns, 0), order=1, mode="nearest"))


def _sampled(image: Image, rows: Image, columns: Image) -> Image:
    channels = [ndimage.map_coordinates(image[..., k], (rows, columns), order=1, mode="nearest") for k in range(3)]
    return np.stack(channels, axis=-1)


def _cloud(random: np.random.Generator, size: int, cells: int) -> Image:
    coarse = random.uniform(0.0, 1.0, (cells + 1, cells + 1))
    places = np.linspace(0, cells, size)
    rows, columns = np.meshgrid(places, places, indexing="ij")
    return np.asarray(ndimage.map_coordinates(coarse, (rows, columns), order=1, mode="nearest"))
