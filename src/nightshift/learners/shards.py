"""Sharded checkpoints (torch.distributed.checkpoint): each rank writes what it holds, and any number of ranks reads it.

<folder>/__0_0.distcp …   the tensors of one rank
         .metadata        names and shapes of all tensors, and where their parts are
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from enum import Enum, EnumType
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from nightshift import files
from nightshift.algorithms.strategy import Allocate, allocate_whole
from nightshift.errors import DataError

METADATA = ".metadata"
_DCP = "torch.distributed.checkpoint"
_RECORDS = {
    f"{_DCP}.metadata": {
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
        *("StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    f"{_DCP}.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath"},
}
"""By module: all that torch's metadata is made of, besides dtypes. It is a pickle, which could name any function."""


def write(folder: Path, tensors: Mapping[str, Tensor], rank: int) -> dict[str, str]:
    """Called by all ranks with the same names; the sha256 sums of the files that this rank wrote."""
    save(dict(tensors), storage_writer=FileSystemWriter(folder, sync_files=True))
    written = [*folder.glob(f"__{rank}_*"), *([folder / METADATA] if rank == 0 else [])]
    return {path.name: files.sha256(path) for path in written}


def read(folder: Path, allocate: Allocate = allocate_whole, prefix: str = "") -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`; of a DTensor that `allocate` makes, this rank reads its part."""
    tensors = {
        name: allocate(name, entry.size, entry.properties.dtype)
        for name, entry in _Reader(folder).read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith(prefix)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # on purpose
        load(tensors, storage_reader=_Reader(folder), no_dist=True)
    return tensors


class _Reader(FileSystemReader):
    """As of torch, but builds the records of the metadata and calls nothing else that the file names."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        with (Path(self.path) / METADATA).open("rb") as stream:
            metadata: Metadata = _Unpickler(stream).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _member(kind: Any, name: str) -> Enum:
    """What Python before 3.11.4 calls getattr for in a pickle: a member of an enumeration, and nothing else here."""
    if isinstance(kind, EnumType):
        member: Enum = kind[name]
        return member
    raise _unknown(f"attribute {name} of {kind!r}")


def _unknown(name: str) -> DataError:
    return DataError(
        f"metadata of a sharded checkpoint names {name}, which torch {torch.__version__} does not write",
        "remove this stage's folder in .state and run again: training starts from the beginning",
    )


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _RECORDS.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise _unknown(f"{module}.{name}")
