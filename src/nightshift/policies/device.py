"""Where policies act and learn. Nothing else asks which devices there are.

torch is imported where it is asked: `nightshift plan` does without it where there is no GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from importlib import metadata
from typing import TYPE_CHECKING, Literal

from nightshift.errors import DeviceError

if TYPE_CHECKING:
    import torch

Setting = Literal["auto", "cpu", "cuda"]
"""Of machine.device in params.yaml."""


def is_surely_cpu(setting: Setting) -> bool:
    """What can be told without importing torch: the CPU is asked for, or torch has no driver of a GPU to load."""
    return setting == "cpu" or (setting == "auto" and not _may_find_gpu())


def _may_find_gpu() -> bool:
    build = metadata.version("torch").partition("+")[2]
    if build == "cpu" or build.startswith("rocm"):
        return build != "cpu"
    try:
        ctypes.CDLL("libcuda.so.1")  # the name by which torch loads it
    except OSError:
        return False
    return True


def resolve(setting: Setting) -> torch.device:
    """The device that machine.device of params.yaml names."""
    import torch

    present = torch.cuda.is_available()
    if setting == "cuda" and not present:
        raise DeviceError("machine.device is cuda, and torch finds no GPU here", "set machine.device to auto or cpu")
    return torch.device("cuda" if present and setting != "cpu" else "cpu")


def free_memory(gpu: torch.device) -> int:
    """Bytes, with those that torch has reserved and does not use."""
    import torch

    free, _ = torch.cuda.mem_get_info(gpu)
    return free + torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu)


POLICY_SIZE = "the size of the policy (section policy)"
"""What to lower where the weights alone do not fit."""


@contextlib.contextmanager
def out_of_memory_advice(setting: str) -> Iterator[None]:
    """Turn the GPU's running out of memory into a sentence that says which setting to lower."""
    import torch

    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        first = str(error).split(". ")[0]
        raise DeviceError(f"the GPU has not enough memory: {first}", f"lower {setting} in params.yaml") from None
