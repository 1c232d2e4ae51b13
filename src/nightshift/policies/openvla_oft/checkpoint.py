"""Published checkpoints: safetensors in one file or in shards, with what lies beside them.

`PublishedCheckpoint.open` reads headers alone, so that all that does not fit is refused before memory is taken. `load`
then reads one tensor after the other: a model takes little more memory than its own weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from nightshift.errors import DataError
from nightshift.policies.openvla_oft import architecture
from nightshift.policies.openvla_oft.lora import Adapter
from nightshift.policies.openvla_oft.network import (
    ACTION_TOKENS,
    FIRST_ACTION_TOKEN,
    LM_HEAD,
    PARTS,
    TOWERS,
    OpenVlaOftNetwork,
)

Shape = tuple[int, ...]
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_INCOMPLETE = "download the checkpoint again"
_OTHER = "this family loads OpenVLA-OFT and its variants; choose another policy.family or another checkpoint"
_UNUSED = re.compile(r"\.attn_pool\.|featurizer\.norm\.|rotary_emb\.inv_freq$")
"""Tensors of published files that nothing reads."""


@dataclass(frozen=True)
class PublishedCheckpoint:
    folder: Path
    shapes: Mapping[str, Shape]
    """Of all tensors, by their published names."""
    files: Mapping[str, Path]
    """Where each of them is in safetensors."""
    parts: Mapping[str, Tensor]
    """Tensors of modules that have files of their own, mapped from disk."""

    @classmethod
    def open(cls, folder: Path, adapter: Path | None = None) -> PublishedCheckpoint:
        """Modules that were trained whole beside an adapter lie in its folder, and replace those of the checkpoint."""
        shapes, files = read_headers(folder)
        parts = {**_parts(folder), **({} if adapter is None else _parts(adapter))}
        shapes.update({name: tuple(tensor.shape) for name, tensor in parts.items()})
        return cls(folder, shapes, files, parts)

    def json(self, name: str) -> Any:
        path = self.folder / name
        try:
            return json.loads(path.read_text())
        except FileNotFoundError:
            raise DataError(f"the checkpoint {self.folder} has no {name}", _INCOMPLETE) from None
        except json.JSONDecodeError as error:
            raise DataError(f"{path} is not JSON: {error}", _INCOMPLETE) from None

    def norm_stats(self) -> Mapping[str, Any]:
        """Of every dataset that the model was trained on; fine-tuning writes them to a file, OpenVLA to its config."""
        if (self.folder / "dataset_statistics.json").exists():
            found: Mapping[str, Any] = self.json("dataset_statistics.json")
            return found
        return dict(self.json("config.json").get("norm_stats") or {})

    def check(self, network: OpenVlaOftNetwork) -> None:
        """DataError: a tensor is missing, has another shape, or belongs to another architecture."""
        expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
        if LM_HEAD in expected:
            expected[LM_HEAD] = tuple(network.language_model.model.embed_tokens.weight.shape)
        for name, shape in expected.items():
            if name not in self.shapes:
                raise DataError(f"the checkpoint {self.folder} has no {name}", _OTHER)
            if self.shapes[name] != shape:
                raise DataError(
                    f"{name} has shape {list(self.shapes[name])} in {self.folder}, and {list(shape)} is expected",
                    _OTHER,
                )
        strange = [name for name in self.shapes if name not in expected and not self._is_unused(name)]
        if strange:
            raise DataError(
                f"the checkpoint {self.folder} has {strange[0]}, which OpenVLA-OFT does not have"
                + (f", and {len(strange) - 1} more" if len(strange) > 1 else ""),
                _OTHER,
            )

    def load(self, network: OpenVlaOftNetwork, dtype: torch.dtype, adapter: Adapter | None) -> None:
        """Give a network on the meta device its weights, merged with those of the adapter."""
        with ExitStack() as stack:
            opened = {path: stack.enter_context(safe_open(path, "pt")) for path in set(self.files.values())}
            for name in network.state_dict():
                tensor = self.parts[name] if name in self.parts else self._read(opened[self.files[name]], name)
                if adapter is not None:
                    tensor = adapter.merged(name, tensor, _rows(name))
                wide = name.startswith("action_head.")
                weight = tensor.to(torch.float32 if wide else dtype, copy=True)
                network.load_state_dict({name: weight}, strict=False, assign=True)

    def _read(self, opened: Any, name: str) -> Tensor:
        rows = _rows(name)
        tensor: Tensor = opened.get_slice(name)[rows] if rows is not None else opened.get_tensor(name)
        return tensor

    def _is_unused(self, name: str) -> bool:
        last = (f"vision_backbone.{tower}.blocks.{architecture.blocks(self.shapes, tower) - 1}." for tower in TOWERS)
        return bool(_UNUSED.search(name)) or name.startswith((*last, *PARTS, LM_HEAD))


def _rows(name: str) -> slice | None:
    """The part of a published tensor that the network has; None = all of it."""
    return slice(FIRST_ACTION_TOKEN, FIRST_ACTION_TOKEN + ACTION_TOKENS) if name == LM_HEAD else None


def read_headers(folder: Path) -> tuple[dict[str, Shape], dict[str, Path]]:
    """The shape of every tensor of a checkpoint by name, and the file that has it. DataError: it is incomplete."""
    if not folder.is_dir():
        raise DataError(f"there is no checkpoint folder {folder}", "set policy.checkpoint.path in params.yaml")
    shapes: dict[str, Shape] = {}
    files: dict[str, Path] = {}
    for path, names in _shards(folder):
        for name, shape in _header(path).items():
            shapes[name], files[name] = shape, path
        missing = [name for name in names if name not in shapes]
        if missing:
            raise DataError(f"{path} lacks {missing[0]}, which {INDEX} says it has", _INCOMPLETE)
    return shapes, files


def _shards(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Every file of weights, and the tensors that it has to have."""
    if (folder / SINGLE).exists():
        yield folder / SINGLE, []
        return
    if not (folder / INDEX).exists():
        raise DataError(
            f"{folder} has neither {SINGLE} nor {INDEX}", "set policy.checkpoint.path to a published checkpoint"
        )
    try:
        weight_map: Mapping[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    except (json.JSONDecodeError, KeyError) as error:
        raise DataError(f"{folder / INDEX} is damaged: {error!r}", _INCOMPLETE) from None
    for shard in sorted(set(weight_map.values())):
        yield folder / shard, [name for name, file in weight_map.items() if file == shard]


def _header(path: Path) -> dict[str, Shape]:
    try:
        with safe_open(path, "pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise DataError(f"the shard {path} is missing", _INCOMPLETE) from None
    except SafetensorError as error:
        raise DataError(f"{path} is truncated or damaged: {error}", _INCOMPLETE) from None


def save_part(name: str, module: nn.Module, folder: Path) -> None:
    """A module in a file of its own, as OpenVLA-OFT saves it, into a folder that is being written."""
    tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in module.state_dict().items()}
    torch.save(tensors, folder / f"{name}--trained_checkpoint.pt")


def _parts(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for part in PARTS for name, tensor in _part(folder, part).items()}


def _part(folder: Path, part: str) -> dict[str, Tensor]:
    """The tensors of a module in a file of its own, mapped from disk; empty where there is none."""
    found = sorted(folder.glob(f"{part}--*_checkpoint.pt"))
    if not found:
        return {}
    if len(found) > 1:
        raise DataError(
            f"{folder} has {len(found)} files {part}--*_checkpoint.pt", "keep the one that belongs to the weights"
        )
    try:
        tensors = torch.load(found[0], map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # noqa: BLE001  # torch has no type of its own for a damaged file
        raise DataError(f"{found[0]} is truncated or damaged: {error}", _INCOMPLETE) from None
    return {f"{part}.{name.removeprefix('module.')}": tensor for name, tensor in tensors.items()}
