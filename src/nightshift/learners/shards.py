"""Sharded checkpoints (torch.distributed.checkpoint): each rank writes what it holds, and any number of ranks reads it.

<folder>/__0_0.distcp …   the tensors of one rank
         .metadata        names and shapes of all tensors, and where their parts are
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from nightshift import files
from nightshift.algorithms.strategy import Allocate, allocate_whole

METADATA = ".metadata"


def write(folder: Path, tensors: Mapping[str, Tensor], rank: int) -> dict[str, str]:
    """Called by all ranks with the same names; the sha256 sums of the files that this rank wrote."""
    save(dict(tensors), storage_writer=FileSystemWriter(folder, sync_files=True))
    written = [*folder.glob(f"__{rank}_*"), *([folder / METADATA] if rank == 0 else [])]
    return {path.name: files.sha256(path) for path in written}


def read(folder: Path, allocate: Allocate = allocate_whole, prefix: str = "") -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`; of a DTensor that `allocate` makes, this rank reads its part."""
    tensors = {
        name: allocate(name, entry.size, entry.properties.dtype)
        for name, entry in FileSystemReader(folder).read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith(prefix)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # on purpose
        load(tensors, storage_reader=FileSystemReader(folder), no_dist=True)
    return tensors
