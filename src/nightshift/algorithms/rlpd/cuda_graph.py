"""A whole update as one CUDA graph: recorded once, and launched again with other numbers in the same memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_WARMUPS = 3
"""Runs before the recording, in which cuBLAS and the allocator set themselves up."""


class CudaGraph:
    def __init__(self, function: Callable[..., dict[str, Tensor]], changed: Sequence[Tensor]) -> None:
        """`function` changes the tensors `changed` in place, and reads no tensor on the CPU.

        Its arguments are tensors in dataclasses, dicts and lists, of the same shapes in every call.
        """
        self._function = function
        self._changed = changed
        self._graph: torch.cuda.CUDAGraph | None = None
        self._arguments: list[Tensor] = []
        self._results: dict[str, Tensor] = {}

    def __call__(self, *arguments: Any) -> dict[str, Tensor]:
        if self._graph is None:
            self._graph = self._record(arguments)
        torch._foreach_copy_(self._arguments, _leaves(arguments))
        self._graph.replay()
        return {name: value.clone() for name, value in self._results.items()}

    def _record(self, arguments: Sequence[Any]) -> torch.cuda.CUDAGraph:
        static = _map(arguments, torch.clone)
        self._arguments = _leaves(static)
        self._warm_up(static)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._results = self._function(*static)
        return graph

    def _warm_up(self, arguments: Sequence[Any]) -> None:
        """Run the function and undo what it changed."""
        before = [tensor.detach().clone() for tensor in self._changed]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARMUPS):
                self._function(*arguments)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.no_grad():
            torch._foreach_copy_(list(self._changed), before)


def _leaves(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def visit(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _map(tree, visit)
    return found


def _map(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same dataclasses, dicts and lists, with every tensor changed."""
    if isinstance(tree, Tensor):
        return change(tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        inner = {field.name: _map(getattr(tree, field.name), change) for field in dataclasses.fields(tree)}
        return type(tree)(**inner)
    if isinstance(tree, Mapping):
        return {name: _map(value, change) for name, value in tree.items()}
    return [_map(value, change) for value in tree]
