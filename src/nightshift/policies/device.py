"""Where policies act and learn. Nothing else asks which devices there are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch

from nightshift.errors import DeviceError


def resolve(setting: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device that machine.device of params.yaml names."""
    present = torch.cuda.is_available()
    if setting == "cuda" and not present:
        raise DeviceError("machine.device is cuda, and torch finds no GPU here", "set machine.device to auto or cpu")
    return torch.device("cuda" if present and setting != "cpu" else "cpu")


def free_memory(gpu: torch.device) -> int:
    """Bytes, with those that torch has reserved and does not use."""
    free, _ = torch.cuda.mem_get_info(gpu)
    return free + torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu)


POLICY_SIZE = "the size of the policy (section policy)"
"""What to lower where the weights alone do not fit."""


@contextlib.contextmanager
def out_of_memory_advice(setting: str) -> Iterator[None]:
    """Turn the GPU's running out of memory into a sentence that says which setting to lower."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        first = str(error).split(". ")[0]
        raise DeviceError(f"the GPU has not enough memory: {first}", f"lower {setting} in params.yaml") from None
