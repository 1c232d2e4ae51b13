"""Published checkpoints: safetensors in one file or in shards, with what lies beside them.

`PublishedCheckpoint.open` reads headers alone, so that all that does not fit is refused before memory is taken. `load`
then reads one tensor after the other: a model takes little more memory than its own weights.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nightshift.errors import DataError
from nightshift.policies.checkpoint_files import (
    INCOMPLETE,
    QUANTISED,
    Shape,
    as_object,
    read_headers,
    read_object,
    read_tensor,
)
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

RIPT_HEADS = "openvla_headers.pt"
_OTHER = "this family loads OpenVLA-OFT and its variants; choose another policy.family or another checkpoint"
_NO_PART = "put the file in its place that OpenVLA-OFT's training saved, or remove it if the policy needs none"
_WITHOUT_PART: Mapping[str, tuple[str, str]] = {
    "action_head": ("policy.head is tokens", "set policy.head: l1 in params.yaml"),
    "proprio_projector": ("policy.inputs has no state vector", "add state to policy.inputs in params.yaml"),
}
_OTHER_PARTS: Mapping[str, str] = {
    "vision_backbone": "the vision backbone of FiLM",
    "noisy_action_projector": "the projector of noisy actions of the diffusion head",
}
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

    def json(self, name: str) -> Mapping[str, Any]:
        """DataError: it is missing, or no object."""
        if not (self.folder / name).exists():
            raise DataError(f"the checkpoint {self.folder} has no {name}", INCOMPLETE)
        return read_object(self.folder / name, INCOMPLETE)

    def field(self, name: str, key: str) -> Mapping[str, Any]:
        """An object in a JSON file; empty where there is none."""
        return as_object(self.json(name).get(key) or {}, f"{key} in {self.folder / name}", INCOMPLETE)

    def norm_stats(self) -> Mapping[str, Any]:
        """Of every dataset that the model was trained on; fine-tuning writes them to a file, OpenVLA to its config."""
        if (self.folder / "dataset_statistics.json").exists():
            return self.json("dataset_statistics.json")
        return self.field("config.json", "norm_stats")

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

    def load(self, network: OpenVlaOftNetwork, adapter: Adapter | None) -> None:
        """Give a network on the meta device its weights, in its dtypes, merged with those of the adapter."""
        for name, empty in network.state_dict().items():
            tensor = self.parts[name] if name in self.parts else read_tensor(self.files[name], name, _rows(name))
            if adapter is not None:
                tensor = adapter.merged(name, tensor, _rows(name))
            weight = tensor.to(empty.dtype, copy=True)
            network.load_state_dict({name: weight}, strict=False, assign=True)

    def replaced(self, network: OpenVlaOftNetwork, adapter: Adapter | None) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the files, one by one: that of the network where it has one, else merged with the adapter."""
        own = network.state_dict()
        for name, path in self.files.items():
            rows = _rows(name)
            if name in own and rows is None:
                yield name, own[name]
                continue
            tensor = read_tensor(path, name)
            if adapter is not None:
                tensor = adapter.merged(name, tensor, None).to(tensor.dtype)
            if name in own:
                tensor = tensor.to(own[name].dtype, copy=True)
                tensor[rows] = own[name]
            yield name, tensor

    def copy_parts(self, network: OpenVlaOftNetwork, adapter: Path | None, folder: Path) -> None:
        """Modules that have files of their own: those of the network, and the files of those that it does not have,
        from the adapter's folder where that has them, as they are loaded."""
        trained = network.always_trained
        sources = [self.folder] if adapter is None else [adapter, self.folder]
        for part in PARTS:
            if part in trained and not any(name.startswith(f"{part}.") for name in self.files):
                save_part(part, trained[part], folder)
            elif part not in trained:
                found = (sorted(source.glob(_part_files(part))) for source in sources)
                for file in next(filter(None, found), []):
                    shutil.copyfile(file, folder / file.name)

    def _is_unused(self, name: str) -> bool:
        last = (f"vision_backbone.{tower}.blocks.{architecture.blocks(self.shapes, tower) - 1}." for tower in TOWERS)
        return bool(_UNUSED.search(name)) or name.startswith((*last, *PARTS, LM_HEAD))


def _rows(name: str) -> slice | None:
    """The part of a published tensor that the network has; None = all of it."""
    return slice(FIRST_ACTION_TOKEN, FIRST_ACTION_TOKEN + ACTION_TOKENS) if name == LM_HEAD else None


def save_part(name: str, module: nn.Module, folder: Path) -> None:
    """A module in a file of its own, as OpenVLA-OFT saves it, into a folder that is being written."""
    tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in module.state_dict().items()}
    torch.save(tensors, folder / f"{name}--trained_checkpoint.pt")


def _part_files(part: str) -> str:
    """Of any number of training steps."""
    return f"{part}--*_checkpoint.pt"


def require_parts_used(folders: Sequence[Path], network: OpenVlaOftNetwork) -> None:
    """DataError: a module was trained with the weights, and without it they mean nothing."""
    for part, (settings, next_step) in _WITHOUT_PART.items():
        files = [file for folder in folders for file in _files_of(folder, part)]
        if files and part not in network.always_trained:
            raise DataError(
                f"{settings}, and the weights were trained with the {part} in {files[0]}",
                f"{next_step}, or remove the file if the weights were trained further without it",
            )


def _files_of(folder: Path, part: str) -> list[Path]:
    ript = folder / RIPT_HEADS
    return [*sorted(folder.glob(_part_files(part))), *([ript] if part == "action_head" and ript.exists() else [])]


def _parts(folder: Path) -> dict[str, Tensor]:
    _refuse_other_parts(folder)
    saved = {name: tensor for part in PARTS for name, tensor in _part(folder, part).items()}
    return {**saved, **_ript_action_head(folder)}


def _refuse_other_parts(folder: Path) -> None:
    for file in sorted(folder.glob(_part_files("*"))):
        part = file.name.split("--")[0]
        if part not in PARTS:
            raise DataError(
                f"{file} is {_OTHER_PARTS.get(part, 'a module')}, which this family does not have",
                "choose a checkpoint of OpenVLA-OFT that was trained without it",
            )


def _ript_action_head(folder: Path) -> dict[str, Tensor]:
    """That of RIPT-VLA, which is trained and saved beside an adapter; empty where there is none.

    The file has a second head, for the scale of the noise, which is not read (docs/policies.md).
    """
    path = folder / RIPT_HEADS
    if not path.exists():
        return {}
    content = _torch_file(path)
    if "action_header" not in content:
        raise DataError(f"{path} has no action_header", INCOMPLETE)
    return _named("action_head", content["action_header"], f"action_header of {path}")


def _part(folder: Path, part: str) -> dict[str, Tensor]:
    """The tensors of a module in a file of its own, mapped from disk; empty where there is none."""
    found = sorted(folder.glob(_part_files(part)))
    if not found:
        return {}
    if len(found) > 1:
        raise DataError(
            f"{folder} has {len(found)} files {_part_files(part)}", "keep the one that belongs to the weights"
        )
    return _named(part, _torch_file(found[0]), str(found[0]))


def _torch_file(path: Path) -> Mapping[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # noqa: BLE001  # torch has no type of its own for a damaged file
        raise DataError(f"{path} is truncated or damaged: {error}", INCOMPLETE) from None
    return _mapping(content, str(path))


def _mapping(content: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(content, Mapping):
        raise DataError(f"{where} is a {type(content).__name__}, and tensors by name are expected", _NO_PART)
    return content


def _named(part: str, content: Any, where: str) -> dict[str, Tensor]:
    """Data parallelism puts `module.` before names."""
    tensors = _mapping(content, where)
    strange = next((name for name, value in tensors.items() if not isinstance(value, Tensor)), None)
    if strange is not None:
        raise DataError(f"{strange} in {where} is a {type(tensors[strange]).__name__} and no tensor", _NO_PART)
    integers = next((name for name, tensor in tensors.items() if not tensor.is_floating_point()), None)
    if integers is not None:
        raise DataError(
            f"{integers} in {where} is of type {tensors[integers].dtype}, and floating-point numbers are expected",
            QUANTISED,
        )
    return {f"{part}.{str(name).removeprefix('module.')}": tensor for name, tensor in tensors.items()}
