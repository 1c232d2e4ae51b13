"""What policies that see have in common: cameras, state vectors and the instruction in; augmentation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from torch import Tensor, nn

from nightshift.policies import modalities, readable
from nightshift.policies.augmentation import DRAWS, augment_cameras
from nightshift.policies.base import EncoderPolicy, Inputs, Shapes
from nightshift.policies.encoders import Normaliser
from nightshift.types import Observation

if TYPE_CHECKING:
    from nightshift import config


class AugmentationSpec(TypedDict):
    crop: int
    jitter: float


class VisionSpec(TypedDict):
    """What every policy that sees is built from."""

    inputs: Shapes
    max_words: int
    augmentation: AugmentationSpec
    chunk: int
    action_dim: int


class VisionPolicy(EncoderPolicy):
    def __init__(self, spec: VisionSpec) -> None:
        super().__init__(chunk=spec["chunk"], action_dim=spec["action_dim"])
        self._spec = spec
        self.modalities = modalities.Modalities(spec["inputs"], spec["max_words"])
        self.normalisers = nn.ModuleDict({name: Normaliser(size) for name, size in self.modalities.vectors.items()})

    @property
    def spec(self) -> Mapping[str, Any]:
        return {"family": self.family, **self._spec, "inputs": {n: list(s) for n, s in self.modalities.shapes.items()}}

    @property
    @abstractmethod
    def family(self) -> str:
        """The name in params.yaml."""

    @property
    def shapes(self) -> Shapes:
        return self.modalities.shapes

    def normalise_by(self, statistics: Mapping[str, Mapping[str, Any]]) -> None:
        for name, normaliser in self.normalisers.items():
            assert isinstance(normaliser, Normaliser)
            normaliser.normalise_by(statistics[f"observations.{name}"])
        self.normalise_actions_by(statistics["actions"])

    @abstractmethod
    def normalise_actions_by(self, statistics: Mapping[str, Any]) -> None:
        """Those of the demos' actions: mean, std, min, max."""

    def inputs(self, observations: Observation) -> dict[str, Tensor]:
        return self.modalities.tensors(observations)

    def normalised(self, inputs: Inputs) -> dict[str, Tensor]:
        """The state vectors among the inputs, in standard deviations of the demos."""
        return {name: normalise(inputs[name]) for name, normalise in self.normalisers.items()}

    @property
    def augmentation_draws(self) -> int:
        return DRAWS * len(self.modalities.cameras)

    def augment(self, inputs: Inputs, draws: Tensor) -> Inputs:
        return augment_cameras(inputs, self.modalities.cameras, draws, **self._spec["augmentation"])


def vision_spec(settings: config.Cnn | config.Vla | config.Flow, shapes: Shapes, action_dim: int) -> VisionSpec:
    """What a section of params.yaml and the shapes of all observations say about a policy that sees."""
    return VisionSpec(
        inputs=readable.seen(settings, shapes),
        max_words=settings.max_words,
        augmentation=AugmentationSpec(crop=settings.augmentation.crop, jitter=settings.augmentation.jitter),
        chunk=settings.chunk,
        action_dim=action_dim,
    )
