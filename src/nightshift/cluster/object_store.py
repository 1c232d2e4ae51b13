"""Weights in Ray's object store: written once, and read once by every node that needs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from nightshift.errors import RolloutError


class ObjectStoreWeights(Mapping[str, NDArray[Any]]):
    """Is sent as a reference and fetched at first use: a worker that has these weights already fetches nothing."""

    def __init__(self, reference: Any) -> None:
        """`reference`: to a dict of weights."""
        self._reference = reference

    @classmethod
    def of(cls, weights: Mapping[str, NDArray[Any]]) -> ObjectStoreWeights:
        """Put `weights` into the object store, if they are not there yet."""
        return weights if isinstance(weights, cls) else cls(ray.put(dict(weights)))

    @cached_property
    def _weights(self) -> Mapping[str, NDArray[Any]]:
        try:
            fetched: Mapping[str, NDArray[Any]] = ray.get(self._reference)
        except RayError as error:
            raise RolloutError("the node that held the weights of a policy is lost", "run again: it resumes") from error
        return fetched

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def __reduce__(self) -> tuple[type[ObjectStoreWeights], tuple[Any]]:
        return type(self), (self._reference,)  # without the weights, also where they were fetched
