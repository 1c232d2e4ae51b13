"""A buffer in a folder, whole: a file per trajectory, the index, the metadata, and a manifest of sha256 sums.

The manifest is written last and the folder takes its name in one step, so it is there complete or not at all. Folders
that RLinf wrote can be loaded too; they have no sums to check.
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
from nightshift.data.replay import formats, incoming, legacy
from nightshift.data.replay.checks import WEIGHTS_ID
from nightshift.data.replay.index import INDEX, LEGACY_INDEX, METADATA, OLDEST, Entry, from_json, to_json
from nightshift.data.replay.keeping import Export
from nightshift.data.replay.trajectory import TrajectoryBatch
from nightshift.data.tensors import SUFFIX
from nightshift.errors import DataError

FORMAT = "safetensors"
REMEDY = "load another checkpoint: this one is not what was saved"
_FILE = re.compile(rf"trajectory_(\d+)_{WEIGHTS_ID.pattern}{re.escape(SUFFIX)}")


@dataclass(frozen=True)
class Shard:
    """One rank's part of the trajectories: they are split in order, the first ranks get one more where it must be."""

    rank: int
    world_size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise DataError(f"local_rank is {self.rank}; with {self.world_size} ranks it must be 0 to world_size - 1")

    def of(self, entries: list[Entry]) -> list[Entry]:
        each, more = divmod(len(entries), self.world_size)
        start = self.rank * each + min(self.rank, more)
        return entries[start : start + each + (self.rank < more)]

    def generator(self, saved: torch.Generator) -> torch.Generator:
        """Draws of its own for each of several ranks, or they would all draw the same numbers."""
        if self.world_size == 1:
            return saved
        origin = saved.get_state().numpy().tobytes() + f"{self.rank} of {self.world_size}".encode()
        return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(origin).digest()[:8]))


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a checkpoint holds for one rank; its files have been checked."""

    folder: Path
    entries: list[Entry]
    counter: int
    seed: int
    generator: torch.Generator
    suffix: str

    def source(self, entry: Entry) -> TrajectoryBatch | Path:
        path = self.folder / entry.file_name(self.suffix)
        return path if self.suffix == SUFFIX else legacy.read(path, entry)


def check_replaceable(path: Path) -> None:
    """Refuse a place where anything but a checkpoint is, since that would be gone."""
    is_checkpoint = (path / files.MANIFEST).is_file() and (path / INDEX).is_file()
    is_empty = path.is_dir() and not any(path.iterdir())
    if path.exists() and not (is_checkpoint or is_empty):
        raise DataError(f"{path} is there and is not a replay checkpoint: it would be lost", "choose another folder")


def save(path: Path, exports: Sequence[tuple[Entry, Export]], metadata: dict[str, Any]) -> None:
    sums: dict[str, str] = {}
    with files.new_folder(path, sums) as folder:
        entries = []
        for entry, export in exports:
            name = entry.file_name(SUFFIX)
            sums[name] = export(folder / name)
            entries.append(replace(entry, sha256=sums[name]))
        files.write_json(folder / INDEX, to_json(entries))
        files.write_json(folder / METADATA, metadata)


def metadata(entries: Sequence[Entry], counter: int, seed: int, generator: torch.Generator) -> dict[str, Any]:
    return {
        "trajectory_format": FORMAT,
        "size": len(entries),
        "total_samples": sum(entry.num_samples for entry in entries),
        "trajectory_counter": counter,
        "seed": seed,
        "random_state": base64.b64encode(generator.get_state().numpy().tobytes()).decode(),
    }


def load(folder: Path, shard: Shard, seed: int, capacity: int) -> Saved:
    """What the folder holds for a rank, after checking that rank's files; `seed` if the folder names none.

    Of a rank's trajectories the newest `capacity` count, or all if it is 0.
    """
    folder = incoming.valid(folder)
    content = _read_json(folder / METADATA)
    index = folder / (LEGACY_INDEX if (folder / LEGACY_INDEX).exists() and not (folder / INDEX).exists() else INDEX)
    listing = _read_json(index)
    listed = from_json(listing, index)
    everything = sorted([*listed, *_unlisted(folder, listing, listed)], key=lambda entry: entry.trajectory_id)
    entries = shard.of(everything)[-capacity:]
    suffix = f".{content.get('trajectory_format')}"
    if suffix not in (SUFFIX, *legacy.SUFFIXES):
        raise DataError(f"{folder / METADATA} names the format {suffix[1:]!r}", f"{FORMAT}, pt and pkl can be read")
    _verify(folder, entries, suffix)
    seed = int(content.get("seed", seed))
    return Saved(
        folder=folder,
        entries=entries,
        counter=max([int(content.get("trajectory_counter", 0)), *(e.trajectory_id + 1 for e in everything)]),
        seed=seed,
        generator=shard.generator(_generator(content, seed, folder / METADATA)),
        suffix=suffix,
    )


def _unlisted(folder: Path, listing: Mapping[str, Any], listed: Sequence[Entry]) -> list[Entry]:
    """What a buffer had written when it was killed, and not listed yet: a file has its name once it is whole."""
    if OLDEST not in listing:
        return []
    known = {entry.trajectory_id for entry in listed}
    found = []
    for path in folder.glob(f"trajectory_*{SUFFIX}"):
        match = _FILE.fullmatch(path.name)
        if match and int(match[1]) >= listing[OLDEST] and int(match[1]) not in known:
            found.append(Entry.of(int(match[1]), formats.read(path)))
    return found


def _verify(folder: Path, entries: Sequence[Entry], suffix: str) -> None:
    """Every file that is going to be read is there and is what was written, as far as the folder has sums."""
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
        raise DataError(f"{path} is damaged: it holds no object", REMEDY)
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
