"""What other libraries compute from weights and inputs of a recipe (README.md); oracles.py wrote the files."""

from __future__ import annotations

import json as json_format
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

FOLDER = Path(__file__).parent


@cache
def _arrays(name: str) -> dict[str, Any]:
    with np.load(FOLDER / f"{name}.npz") as file:
        return dict(file)


def json(name: str) -> Any:
    return json_format.loads((FOLDER / f"{name}.json").read_text())


def tensor(file: str, name: str) -> Tensor:
    return torch.from_numpy(_arrays(file)[name])
