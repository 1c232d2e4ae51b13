"""Tensors as numpy arrays, which processes exchange, in dtypes that tell what they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BFLOAT16 = np.dtype([("bfloat16", np.int16)])
"""The bits of a bfloat16, which numpy does not have: the dtype of an array must say that they are no numbers."""


def to_array(tensor: Tensor) -> NDArray[Any]:
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(BFLOAT16)
    array: NDArray[Any] = tensor.numpy()
    return array


def to_tensor(array: NDArray[Any]) -> Tensor:
    """Shares the memory of the array, which is writable and contiguous."""
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
