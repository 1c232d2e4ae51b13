"""Writes an OpenVLA-OFT checkpoint with random weights, in the layout of the published ones.

It stands for a checkpoint that is still to be downloaded: with it a machine shows whether it carries a recipe, how long
an iteration takes, and in how much memory. Its sizes and the words of its tokenizer are those of the recipe.

Example:
    python scripts/random_checkpoint.py /data/random --recipe recipes/openvla_oft_7b.yaml --device cuda
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

from nightshift import config, envs
from nightshift.policies.checkpoint_files import INDEX
from nightshift.policies.modalities import select
from nightshift.policies.openvla_oft import opening
from nightshift.policies.openvla_oft.architecture import MODEL_TYPE, TIMM_IDS
from nightshift.policies.openvla_oft.network import LM_HEAD, TOWERS, OpenVlaOftNetwork
from nightshift.policies.openvla_oft.spec import OpenVlaOftSpec
from nightshift.policies.openvla_oft.tokenizer import PROMPT, SPACE
from nightshift.project import paths

PROJECT = Path(__file__).parents[1]
STD = 0.02
"""Of weights, as Llama's are drawn."""
SHARD_BYTES = 5_000_000_000
ACTION_DIM = 7


def write(folder: Path, params: config.Params, device: str) -> None:
    settings = params.policy
    if not isinstance(settings, config.OpenVlaOft) or settings.size is None:
        raise SystemExit("the recipe has no policy.size of an openvla-oft: give one for random weights")
    folder.mkdir(parents=True)
    observed = {name: spec.shape for name, spec in envs.observation_space(params.env).items()}
    spec = opening.random_spec(settings, select(settings.inputs, observed), ACTION_DIM)
    shards = _write_shards(folder, published_shapes(spec), device)
    instructions = [task.language for task in envs.tasks(params.env)]
    _write_json(folder / "config.json", _config(spec))
    _write_json(folder / "preprocessor_config.json", {"tvf_normalize_params": _pixels(spec)})
    _write_json(folder / "tokenizer.json", tokenizer(instructions))
    _write_json(folder / "dataset_statistics.json", {params.env.suite: {"action": _ranges()}})
    _write_json(folder / INDEX, {"metadata": {}, "weight_map": shards})  # last: without it there is no checkpoint


def published_shapes(spec: OpenVlaOftSpec) -> Mapping[str, torch.Size]:
    """Of the tensors of the files, which have more than is read: a last block of each tower, and all output rows."""
    network = spec["network"]
    towers: Any = {name: {**network[name], "depth": network[name]["depth"] + 1} for name in ("dinov2", "siglip")}
    with torch.device("meta"):
        built = OpenVlaOftNetwork({**network, **towers})
    shapes = {name: tensor.shape for name, tensor in built.state_dict().items()}
    for tower, width in zip(TOWERS, (network["dinov2"]["width"], network["siglip"]["width"]), strict=True):
        shapes |= {f"vision_backbone.{tower}.norm.{part}": torch.Size([width]) for part in ("weight", "bias")}
    llama = network["llama"]
    return {**shapes, LM_HEAD: torch.Size([llama["vocabulary"], llama["width"]])}


def tokenizer(instructions: Iterable[str]) -> Mapping[str, Any]:
    """Every word of the prompts is one token, as most are in Llama's; characters and bytes are tokens as well."""
    words = sorted({word for text in instructions for word in re.findall(r"\w+", PROMPT.format(text.lower()))})
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *map(chr, range(33, 127))]
    prefixes = [[word[:end] for end in range(1, len(word) + 1)] for word in ("\u2581" + word for word in words)]
    merges = list(dict.fromkeys(f"{left} {right[-1]}" for grown in prefixes for left, right in pairwise(grown)))
    pieces += [merge.replace(" ", "") for merge in merges]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    return {"model": {"type": "BPE", "vocab": {**vocabulary, "\u2581": SPACE}, "merges": merges}}


def _write_shards(folder: Path, shapes: Mapping[str, torch.Size], device: str) -> Mapping[str, str]:
    """The file of every tensor."""
    groups = list(_groups(shapes))
    placed: dict[str, str] = {}
    generator = torch.Generator(device).manual_seed(0)
    for number, names in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        save_file({name: _drawn(name, shapes[name], generator).cpu() for name in names}, folder / file)
        placed |= dict.fromkeys(names, file)
    return placed


def _groups(shapes: Mapping[str, torch.Size]) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for name, shape in shapes.items():
        if group and size + 2 * shape.numel() > SHARD_BYTES:
            yield group
            group, size = [], 0
        group.append(name)
        size += 2 * shape.numel()
    yield group


def _drawn(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    if "norm" in name and name.endswith("weight"):
        return torch.ones(shape, dtype=torch.bfloat16)
    drawn = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
    return drawn.normal_(std=STD, generator=generator)


def _config(spec: OpenVlaOftSpec) -> Mapping[str, Any]:
    llama = spec["network"]["llama"]
    text = {"num_attention_heads": llama["heads"], "vocab_size": llama["vocabulary"]}
    return {"model_type": MODEL_TYPE, "timm_model_ids": TIMM_IDS, "text_config": text}


def _pixels(spec: OpenVlaOftSpec) -> list[Mapping[str, Any]]:
    return [{key: spec["pixels"][key][start : start + 3] for key in ("mean", "std")} for start in (0, 3)]


def _ranges() -> Mapping[str, Any]:
    """Actions of LIBERO go from -1 to 1; OpenVLA's gripper is not scaled."""
    low, high = [-1.0] * ACTION_DIM, [1.0] * ACTION_DIM
    return {"q01": low, "q99": high, "min": low, "max": high, "mask": [True] * (ACTION_DIM - 1) + [False]}


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="is made; nothing is written over")
    parser.add_argument("--recipe", type=Path, default=PROJECT / "recipes/openvla_oft_7b.yaml")
    parser.add_argument("--device", default="cpu", help="that draws the weights; cuda is many times faster")
    arguments = parser.parse_args()
    defaults = yaml.safe_load((PROJECT / paths.PARAMS).read_text())
    params = config.Params.model_validate(config.merged(defaults, yaml.safe_load(arguments.recipe.read_text())))
    write(arguments.folder, params, arguments.device)


if __name__ == "__main__":
    main()
