"""Which observations a policy can read: asked by the families when they are built, and by the precheck before that.

Without torch, which takes longer to import than all of `nightshift plan`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from nightshift.errors import ConfigError
from nightshift.types import INSTRUCTION

if TYPE_CHECKING:
    from nightshift import config
    from nightshift.policies.base import Shapes

_CHANNELS = 3
_WORD = re.compile(r"\w+")


class Kinds(NamedTuple):
    """Observations by what they are; the instruction is neither."""

    cameras: dict[str, tuple[int, int]]
    """Height and width by name."""
    vectors: dict[str, int]
    """Sizes by name."""


def select(names: Sequence[str], shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """The shapes of a policy's inputs among those of all observations."""
    unknown = [name for name in names if name not in shapes]
    if unknown:
        raise ConfigError(
            f"policy.inputs has {', '.join(unknown)}, and the observations are {', '.join(shapes)}",
            "edit policy.inputs, or add a camera to env.cameras.names, in params.yaml",
        )
    return {name: shapes[name] for name in names}


def vectors(names: Sequence[str], shapes: Shapes, family: str) -> dict[str, int]:
    """The sizes of the inputs of a policy that reads state vectors alone."""
    selected = select(names, shapes)
    for name, shape in selected.items():
        if len(shape) != 1:
            raise ConfigError(
                f"a {family} policy reads state vectors, and {name} is none",
                "take it out of policy.inputs, or choose another policy.family, in params.yaml",
            )
    return {name: shape[0] for name, shape in selected.items()}


def kinds(shapes: Shapes) -> Kinds:
    """The inputs of a policy that sees."""
    found = Kinds(cameras={}, vectors={})
    for name, shape in shapes.items():
        match tuple(shape):
            case () if name == INSTRUCTION:
                pass
            case (size,):
                found.vectors[name] = size
            case (height, width, channels) if channels == _CHANNELS:
                found.cameras[name] = (height, width)
            case _:
                raise ConfigError(
                    f"{name}, an observation of shape {list(shape)}, is neither a camera image [height, width, 3], "
                    f"nor a vector, nor the {INSTRUCTION}",
                    "take it out of policy.inputs in params.yaml",
                )
    return found


def seen(settings: config.Cnn | config.Vla | config.Flow, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """The shapes of the inputs of a policy that sees."""
    selected = select(settings.inputs, shapes)
    kinds(selected)
    return selected


def seen_in_patches(settings: config.Vla | config.Flow, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """The same of a transformer."""
    selected = seen(settings, shapes)
    _require_whole_patches(kinds(selected).cameras, settings.patch_size)
    return selected


def _require_whole_patches(cameras: Mapping[str, tuple[int, int]], patch_size: int) -> None:
    for name, (height, width) in cameras.items():
        if height % patch_size or width % patch_size:
            raise ConfigError(
                f"images of {name} have {height} × {width} pixels, which patches of {patch_size} do not divide",
                "change policy.patch_size or env.cameras.size in params.yaml",
            )


def words(text: str, max_words: int) -> list[str]:
    """The words of an instruction."""
    found = _WORD.findall(text.lower())
    if len(found) > max_words:
        raise ConfigError(
            f"the instruction {text!r} has {len(found)} words, and the policy reads {max_words} (policy.max_words)",
            f"set policy.max_words in params.yaml to {len(found)} or more",
        )
    return found
