"""Weights in Ray's object store: written once, and read once by every node that needs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import ray
from numpy.typing import NDArray


class ObjectStoreWeights(Mapping[str, NDArray[Any]]):
    """Is sent as a reference and fetched at first use: a worker that has these weights already fetches nothing."""

    def __init__(self, weights: Mapping[str, NDArray[Any]]) -> None:
        self._reference = ray.put(dict(weights))

    @cached_property
    def _weights(self) -> Mapping[str, NDArray[Any]]:
        fetched: Mapping[str, NDArray[Any]] = ray.get(self._reference)
        return fetched

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
