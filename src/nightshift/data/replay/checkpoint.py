"""A replay checkpoint: a folder with a file per trajectory, the index, the metadata, and a manifest of sha256 sums.

The manifest is written last and the folder is renamed into place, so a checkpoint is complete or absent. Checkpoints of
RLinf can be loaded too; they have no sums to verify.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nightshift import files
from nightshift.data.replay import rlinf, staging, trajectory_file
from nightshift.data.replay.index import INDEX, METADATA, OLDEST, RLINF_INDEX, TrajectoryEntry, from_json, to_json
from nightshift.data.replay.storage import TrajectoryExport
from nightshift.data.replay.trajectory import TrajectoryBatch
from nightshift.data.replay.validation import WEIGHTS_ID
from nightshift.data.tensors import SUFFIX
from nightshift.errors import DataError

FORMAT = "safetensors"
REMEDY = "load another checkpoint: this one is incomplete or damaged"
_FILE = re.compile(rf"trajectory_(\d+)_{WEIGHTS_ID.pattern}{re.escape(SUFFIX)}")


@dataclass(frozen=True)
class Shard:
    """One rank's contiguous share of the trajectories; the first ranks get the remainder, one each."""

    rank: int
    world_size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise DataError(f"local_rank is {self.rank}; with {self.world_size} ranks it must be 0 to world_size - 1")

    def of(self, entries: list[TrajectoryEntry]) -> list[TrajectoryEntry]:
        each, more = divmod(len(entries), self.world_size)
        start = self.rank * each + min(self.rank, more)
        return entries[start : start + each + (self.rank < more)]

    def generator(self, saved: torch.Generator) -> torch.Generator:
        """A generator per rank; with the same one, all ranks would draw the same numbers."""
        if self.world_size == 1:
            return saved
        origin = saved.get_state().numpy().tobytes() + f"{self.rank} of {self.world_size}".encode()
        return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(origin).digest()[:8]))


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """The content of a checkpoint for one rank, after its files were verified."""

    folder: Path
    entries: list[TrajectoryEntry]
    counter: int
    seed: int
    generator: torch.Generator
    suffix: str

    def source(self, entry: TrajectoryEntry) -> TrajectoryBatch | Path:
        path = self.folder / entry.file_name(self.suffix)
        return path if self.suffix == SUFFIX else rlinf.read(path, entry)


def check_replaceable(path: Path) -> None:
    """Refuse a path that holds anything but a checkpoint, since saving replaces it."""
    is_checkpoint = (path / files.MANIFEST).is_file() and (path / INDEX).is_file()
    is_empty = path.is_dir() and not any(path.iterdir())
    if path.exists() and not (is_checkpoint or is_empty):
        raise DataError(
            f"{path} exists and is not a replay checkpoint; saving would delete it", "choose another folder"
        )


def save(path: Path, exports: Sequence[tuple[TrajectoryEntry, TrajectoryExport]], metadata: dict[str, Any]) -> None:
    sums: dict[str, str] = {}
    with files.new_folder(path, sums) as folder:
        entries = []
        for entry, export in exports:
            name = entry.file_name(SUFFIX)
            sums[name] = export(folder / name)
            entries.append(replace(entry, sha256=sums[name]))
        files.write_json(folder / INDEX, to_json(entries))
        files.write_json(folder / METADATA, metadata)


def metadata(entries: Sequence[TrajectoryEntry], counter: int, seed: int, generator: torch.Generator) -> dict[str, Any]:
    return {
        "trajectory_format": FORMAT,
        "size": len(entries),
        "total_samples": sum(entry.num_samples for entry in entries),
        "trajectory_counter": counter,
        "seed": seed,
        "random_state": base64.b64encode(generator.get_state().numpy().tobytes()).decode(),
    }


def load(folder: Path, shard: Shard, seed: int, capacity: int) -> LoadedCheckpoint:
    """Load a rank's share after verifying its files; `seed` is used if the checkpoint has none.

    Only the newest `capacity` trajectories of the rank are loaded, or all if it is 0.
    """
    folder = staging.current_folder(folder)
    content = _read_json(folder / METADATA)
    index = folder / (RLINF_INDEX if (folder / RLINF_INDEX).exists() and not (folder / INDEX).exists() else INDEX)
    listing = _read_json(index)
    listed = from_json(listing, index)
    all_entries = sorted([*listed, *_unlisted(folder, listing, listed)], key=lambda entry: entry.trajectory_id)
    entries = shard.of(all_entries)[-capacity:]
    suffix = f".{content.get('trajectory_format')}"
    if suffix not in (SUFFIX, *rlinf.SUFFIXES):
        raise DataError(
            f"{folder / METADATA} has the trajectory_format {suffix[1:]!r}", f"{FORMAT}, pt and pkl can be read"
        )
    _verify(folder, entries, suffix)
    seed = int(content.get("seed", seed))
    return LoadedCheckpoint(
        folder=folder,
        entries=entries,
        counter=max([int(content.get("trajectory_counter", 0)), *(e.trajectory_id + 1 for e in all_entries)]),
        seed=seed,
        generator=shard.generator(_generator(content, seed, folder / METADATA)),
        suffix=suffix,
    )


def _unlisted(folder: Path, listing: Mapping[str, Any], listed: Sequence[TrajectoryEntry]) -> list[TrajectoryEntry]:
    """Complete files that a killed buffer had not added to its index yet; files are renamed when they are complete."""
    if OLDEST not in listing:
        return []
    known = {entry.trajectory_id for entry in listed}
    found = []
    for path in folder.glob(f"trajectory_*{SUFFIX}"):
        match = _FILE.fullmatch(path.name)
        if match and int(match[1]) >= listing[OLDEST] and int(match[1]) not in known:
            found.append(TrajectoryEntry.of(int(match[1]), trajectory_file.read(path)))
    return found


def _verify(folder: Path, entries: Sequence[TrajectoryEntry], suffix: str) -> None:
    """Check that every listed file exists, and its sha256 where the checkpoint has one."""
    names = [entry.file_name(suffix) for entry in entries]
    if (folder / files.MANIFEST).exists():
        files.verify_folder(folder, REMEDY, only={*names, INDEX, METADATA})
        return
    for name, entry in zip(names, entries, strict=True):
        if not (folder / name).is_file():
            raise DataError(f"{folder / name} is missing, and the index lists it", REMEDY)
        if entry.sha256 and files.sha256(folder / name) != entry.sha256:
            raise DataError(f"{folder / name} is damaged: its sha256 is not the one in {INDEX}", REMEDY)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise DataError(f"{path} is missing: {path.parent} is not a replay checkpoint", REMEDY) from None
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}", REMEDY) from None
    if not isinstance(content, dict):
        raise DataError(f"{path} is damaged: it does not hold a JSON object", REMEDY)
    return content


def _generator(content: dict[str, Any], seed: int, path: Path) -> torch.Generator:
    generator = torch.Generator().manual_seed(seed)
    if "random_state" in content:
        try:
            state = bytearray(base64.b64decode(content["random_state"]))
            generator.set_state(torch.frombuffer(state, dtype=torch.uint8))
        except (ValueError, TypeError, RuntimeError) as error:
            raise DataError(f"random_state in {path} is damaged: {error}", REMEDY) from None
    return generator
