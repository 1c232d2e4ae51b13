"""Training of the success classifier, the choice of its threshold, and its judgement of segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from nightshift import config
from nightshift.policies.augmentation import DRAWS, augment, crops_by_camera
from nightshift.policies.base import Inputs, to_device
from nightshift.rewards.classifier import SuccessClassifier, Trained
from nightshift.rewards.segments import Frames, Part, Segment
from nightshift.statistics.classification import Confusion, threshold_for

Watch = Callable[[int, float], None]
"""Called after every gradient step with its number and loss."""


def train(
    network: SuccessClassifier, segments: Sequence[Segment], settings: config.Classifier, seed: int, watch: Watch
) -> None:
    """Gradient steps on batches of which one half shows success. The same seed gives the same weights on the CPU."""
    frames = Frames(segments, list(network.modalities.shapes))
    optimizer = torch.optim.Adam(network.parameters(), lr=settings.learning_rate)
    drawing, augmentation = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    device = next(network.parameters()).device
    network.train()
    for step in range(settings.steps):
        observations, labels = frames.balanced(drawing, settings.batch_size)
        inputs = to_device(network.modalities.tensors(observations), device)
        changed = _augmented(network, inputs, settings.augmentation, augmentation)
        loss = functional.binary_cross_entropy_with_logits(network(changed), torch.from_numpy(labels).to(device))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        watch(step + 1, loss.item())
    network.eval()


def _augmented(
    network: SuccessClassifier, inputs: Inputs, settings: config.Augmentation, generator: torch.Generator
) -> dict[str, Tensor]:
    """Every image of every camera has its own shift and colours."""
    changed = dict(inputs)
    crops = crops_by_camera({camera: inputs[camera] for camera in network.cameras}, settings.crop)
    for camera, crop in crops.items():
        draws = torch.rand(len(inputs[camera]), DRAWS, generator=generator)
        changed[camera] = augment(inputs[camera], crop, settings.jitter, draws)
    return changed


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A segment, and its frame that looks most like success."""

    segment: Segment
    frame: int
    score: float
    """The probability of success there: the classifier would give a reward if it reaches the threshold."""


def judge(network: SuccessClassifier, segments: Sequence[Segment]) -> list[Judged]:
    names = list(network.modalities.shapes)
    judged = []
    for segment in segments:
        scores = network.probabilities(segment.observe(names, list(segment.frames)))
        best = int(np.argmax(scores))
        judged.append(Judged(segment=segment, frame=segment.frames[best], score=float(scores[best])))
    return judged


def confusion(judged: Sequence[Judged], threshold: float) -> Confusion:
    return Confusion.of([one.score for one in judged], [one.segment.success for one in judged], threshold)


def calibrated(
    network: SuccessClassifier,
    segments: Sequence[Segment],
    settings: config.Classifier,
    starts: Mapping[str, Part],
) -> Trained:
    """With the threshold that reaches the precision on these segments; DataError if none does."""
    judged = judge(network, segments)
    threshold = threshold_for(
        [one.score for one in judged], [one.segment.success for one in judged], settings.precision
    )
    return Trained(
        network=network,
        threshold=threshold,
        ambiguous_steps=settings.ambiguous_steps,
        tasks=sorted({segment.task for segment in segments}),
        calibration={"target": settings.precision, **confusion(judged, threshold).to_json()},
        starts=starts,
    )
