"""A policy in the layout of the published checkpoint that it began with: safetensors, and what lies beside them.

Every tensor of that checkpoint is written, in its order and under its name: the policy's where it has one, and the
checkpoint's own where nothing here reads it. They are in one file where that checkpoint has one, else in shards, of
which one at a time is in memory besides the policy.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from nightshift import policies
from nightshift.errors import DataError
from nightshift.policies.base import Policy
from nightshift.policies.checkpoint_files import INDEX, SINGLE
from nightshift.policies.lora import CONFIG as ADAPTER_CONFIG
from nightshift.policies.published import BaseSpec, PublishedPolicy

_SHARD_BYTES = 10**9
_WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".gguf")


def base_of(policy: Policy, moved_to: Path | None = None, adapter: Path | None = None) -> BaseSpec:
    """The published checkpoint that a policy began with, or where it and its adapter are said to be; DataError if there
    is none."""
    if not isinstance(policy, PublishedPolicy):
        raise DataError(
            f"a policy of the family {policy.spec['family']} has no published layout", "openvla-oft and pi0 have one"
        )
    base = policy.base
    if moved_to is not None:
        base = {"path": str(moved_to), "adapter": None if base is None else base["adapter"]}
    if base is None:
        raise DataError(
            "the policy began with random weights, or was saved by an older Nightshift, which did not keep the path of "
            "its checkpoint",
            "name the published checkpoint: --base FOLDER",
        )
    return base if adapter is None else {"path": base["path"], "adapter": str(adapter)}


def publish(policy: Policy, base: BaseSpec, folder: Path) -> None:
    """Into a folder that is being written. Adapters are merged into the weights, of this policy as well."""
    assert isinstance(policy, PublishedPolicy)
    merged = policy.without_adapters()
    source, tensors = Path(base["path"]), merged.published_tensors(base)
    if (source / SINGLE).exists():
        _write(policies.on_cpu(dict(tensors)), folder / SINGLE)
    else:
        _write_shards(tensors, folder)
    merged.publish_parts(base, folder)
    _copy_companions(source, folder)


def _write(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_file(dict(tensors), path, metadata={"format": "pt"})


def _write_shards(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    shards = []
    for number, shard in enumerate(_shards(tensors)):
        _write(shard, folder / str(number))
        shards.append({name: tensor.nbytes for name, tensor in shard.items()})
    weight_map = {}
    for number, sizes in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / str(number)).rename(folder / file)
        weight_map.update(dict.fromkeys(sizes, file))
    total = sum(size for sizes in shards for size in sizes.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if shard and sum(each.nbytes for each in shard.values()) + tensor.nbytes > _SHARD_BYTES:
            yield shard
            shard = {}
        shard[name] = tensor.detach().cpu().contiguous()
    yield shard


def _copy_companions(source: Path, folder: Path) -> None:
    """Configuration, tokenizer and statistics, in their subfolders; what a download manager left is hidden."""
    for file in sorted(source.rglob("*")):
        path = file.relative_to(source)
        hidden = any(part.startswith(".") for part in path.parts)
        weights = file.name.endswith(_WEIGHTS) or path == Path(INDEX)
        if file.is_file() and not hidden and not weights and not _is_of_adapter(source, path):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, folder / path)


def _is_of_adapter(source: Path, path: Path) -> bool:
    """Whether a file belongs to an adapter: in its folder, or its configuration beside the checkpoint's own files.

    Without its weights programs cannot open it, and the checkpoint has these merged."""
    folders = [parent for parent in path.parents if parent != Path()]
    return path.name == ADAPTER_CONFIG or any((source / parent / ADAPTER_CONFIG).exists() for parent in folders)
