"""Writes tests/policies/goldens: what transformers, peft, tokenizers and timm compute from weights of a recipe.

Example: pip install nightshift[oracles]; python -m tests.policies.oracles

Tests compare with the files, so none needs these packages. Run it where a recipe changes, or to compare with another
release of a package.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nightshift import policies
from nightshift.policies.openvla_oft.network import OpenVlaOftNetwork
from nightshift.policies.pi0 import siglip
from nightshift.policies.pi0.gemma import GemmaSpec
from tests.policies import cases, recipe
from tests.policies.goldens import FOLDER
from tests.policies.openvla_oft import golden
from tests.policies.pi0 import tiny

PACKAGES = ("transformers", "peft", "tokenizers", "timm", "torch")
NAMES = {
    "vision_tower.": "model.vlm.vision_tower.",
    "projector.": "model.vlm.multi_modal_projector.linear.",
    "language_model.": "model.vlm.language_model.",
    "expert.": "model.dit.",
    "action_out_proj.": "action_out_proj.",
}
"""Of pi0, ours and those of transformers; those of the embedding of states, actions and times follow."""


@torch.no_grad()
def main() -> None:
    _save("pi0", pi0())
    _save("llama", llama())
    _save("towers", towers())
    _save("lora", {**merged_by_peft(), **saved_by_peft(FOLDER / "adapter")})
    tokens()
    _write_json("versions", {package: importlib.metadata.version(package) for package in PACKAGES})


def pi0() -> dict[str, Tensor]:
    """The velocity, and the end of Euler's chain."""
    given, made = tiny.batch(), _their_pi0()
    arguments = _arguments(given)
    return {
        "velocity": made(noise=given.noisy, timestep=given.times, **arguments).logits,
        "denoised": made.sample_actions(noise=given.noisy, num_steps=tiny.STEPS, **arguments),
    }


def llama() -> dict[str, Tensor]:
    """The hidden states of every mask."""
    import transformers

    found = {}
    for attention, padded in cases.LLAMA:
        settings = {"attn_implementation": "sdpa", "is_causal": attention == "causal"}
        config = transformers.LlamaConfig(**golden.recipe()["text_config"], **settings)
        oracle = transformers.LlamaModel(config).eval()
        oracle.load_state_dict(golden.network().language_model.model.state_dict())
        given = cases.llama(attention, padded=padded)
        hidden = oracle(
            inputs_embeds=given.embeddings,
            position_ids=given.positions,
            attention_mask=given.mask if padded else given.real,
        ).last_hidden_state
        found[cases.llama_name(attention, padded=padded)] = hidden
    return found


def towers() -> dict[str, Tensor]:
    """Features of some patches, with few blocks and with all."""
    found = {}
    for name, spec in cases.TOWERS.items():
        found[name] = _features(name, spec["depth"])
        found[f"{name}.whole"] = _features(name, cases.WHOLE[name])
    return found


def _features(name: str, depth: int) -> Tensor:
    """After the last block but one: nothing reads the last."""
    import timm

    made = timm.create_model(name, img_size=224, num_classes=0, depth=depth + 1).eval()
    ours = cases.tower(name, depth).state_dict()
    loaded = made.load_state_dict({k.replace("scale_factor", "gamma"): v for k, v in ours.items()}, strict=False)
    unused = (f"blocks.{depth}.", "norm.", "attn_pool.")
    assert not loaded.unexpected_keys and all(key.startswith(unused) for key in loaded.missing_keys)
    (features,) = made.get_intermediate_layers(cases.pixels(), n=[depth - 1])
    kept: Tensor = features[:, :: cases.EVERY]
    return kept


def merged_by_peft() -> dict[str, Tensor]:
    """Weights that peft merges from the adapter that a policy saved."""
    import peft

    policy = cases.adapted()
    base = OpenVlaOftNetwork(cases.ADAPTED_NETWORK)
    base.load_state_dict({name: tensor for name, tensor in policy.network.state_dict().items() if "lora_" not in name})
    with tempfile.TemporaryDirectory() as folder:
        policies.save(policy, Path(folder))
        merged = peft.PeftModel.from_pretrained(base, f"{folder}/adapter").merge_and_unload().state_dict()
        _write_json("adapter_files", cases.adapter_files(Path(folder) / "adapter"))
    return {f"ours.{name}": merged[name] for name in cases.adapted_weights(policy)}


def saved_by_peft(folder: Path) -> dict[str, Tensor]:
    """Weights that peft merges from an adapter of its own, which is saved in `folder`."""
    import peft

    settings = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["0", "1"], init_lora_weights=False)
    adapted = peft.get_peft_model(cases.linear_and_convolution(), settings)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.copy_(recipe.drawn(name, *parameter.shape))
    adapted.save_pretrained(str(folder))
    (folder / "README.md").unlink(missing_ok=True)
    return {f"theirs.{name}": tensor for name, tensor in adapted.merge_and_unload().state_dict().items()}


def tokens() -> None:
    """A small vocabulary that the library learns, in the form of Llama 2's, and the tokens of some texts."""
    import tokenizers

    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    oracle = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    oracle.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")]
    )
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<s>", "</s>", *bytes_])
    corpus = ["pick up the black bowl and put it on the plate"] * 20 + ["what action should the robot take to"] * 9
    oracle.train_from_iterator(corpus, trainer)
    _write_json("tokenizer", {"model": json.loads(oracle.to_str())["model"]})
    _write_json("token_ids", {text: oracle.encode(text).ids for text in cases.TEXTS})


def _their_pi0() -> Any:
    import transformers

    spec = tiny.SPEC
    vlm = {
        "model_type": "paligemma",
        "text_config": {**_gemma(spec["gemma"]), "vocab_size": spec["vocabulary"]},
        "vision_config": _siglip(),
        "projection_dim": spec["gemma"]["width"],
        "image_token_id": spec["vocabulary"],
    }
    settings = transformers.PI0Config(
        vlm_config=vlm,
        dit_config=_gemma(spec["expert"]),
        chunk_size=spec["horizon"],
        max_state_dim=spec["state_dim"],
        max_action_dim=spec["action_dim"],
    )
    made = transformers.PI0ForConditionalGeneration(settings).eval()
    made.embed_action_time.sinusoid_embeds.forward = embed_time
    found = made.load_state_dict({_name(n): t for n, t in tiny.network().state_dict().items()}, strict=False)
    last = f"model.vlm.language_model.layers.{spec['depth'] - 1}."
    unused = (last, "model.vlm.language_model.norm.", "model.dit.embed_tokens.")
    assert not found.unexpected_keys and all(name.startswith(unused) for name in found.missing_keys), found
    return made


def _gemma(sizes: GemmaSpec) -> dict[str, Any]:
    attention = tiny.SPEC["attention"]
    return {
        "model_type": "gemma",
        "hidden_size": sizes["width"],
        "intermediate_size": sizes["mlp"],
        "num_attention_heads": attention["heads"],
        "num_key_value_heads": attention["key_value_heads"],
        "head_dim": attention["head_width"],
        "num_hidden_layers": tiny.SPEC["depth"],
    }


def _siglip() -> dict[str, Any]:
    sizes = tiny.SPEC["siglip"]
    return {
        "model_type": "siglip_vision_model",
        "hidden_size": sizes["width"],
        "intermediate_size": sizes["mlp"],
        "num_hidden_layers": sizes["depth"],
        "num_attention_heads": sizes["heads"],
        "image_size": tiny.SPEC["image_size"],
        "patch_size": siglip.PATCH,
        "vision_use_head": False,
    }


def _name(name: str) -> str:
    for ours, theirs in NAMES.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return f"embed_action_time.{name}"


def embed_time(times: Tensor) -> Tensor:
    """In double precision, as openpi computes it: transformers' float32 is off by 1e-4 at t = 1."""
    half = tiny.SPEC["expert"]["width"] // 2
    angles = [2 * math.pi * times.double() / (0.004 * 1000 ** (number / (half - 1))) for number in range(half)]
    return torch.stack([*map(torch.sin, angles), *map(torch.cos, angles)], dim=1).float()


def _arguments(given: tiny.Batch) -> dict[str, Tensor]:
    """Tokens of cameras that are not there are left out, and padding is at the end."""
    rows = []
    for cameras, prompt, words in zip(given.cameras, given.prompt, given.words, strict=True):
        seen = torch.full((int(cameras.sum()) * tiny.PATCHES,), tiny.SPEC["vocabulary"])
        rows.append(torch.cat([seen, prompt[words]]))
    return {
        "state": given.state,
        "input_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
        "attention_mask": torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
        "pixel_values": given.images,
        "pixel_attention_mask": given.cameras,
    }


def _save(name: str, tensors: Mapping[str, Tensor]) -> None:
    arrays: dict[str, Any] = {key: tensor.numpy() for key, tensor in tensors.items()}
    np.savez_compressed(FOLDER / f"{name}.npz", **arrays)


def _write_json(name: str, content: Any) -> None:
    (FOLDER / f"{name}.json").write_text(json.dumps(content, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
