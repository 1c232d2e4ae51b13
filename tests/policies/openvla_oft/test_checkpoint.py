"""Published checkpoints are loaded as they are, and what does not fit is one sentence before memory is taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nightshift import config, policies
from nightshift.errors import ConfigError, DataError, NightshiftError
from nightshift.policies.checkpoint_files import INDEX
from nightshift.policies.openvla_oft.checkpoint import RIPT_HEADS, PublishedCheckpoint
from nightshift.policies.openvla_oft.lora import Adapter
from nightshift.policies.openvla_oft.network import LM_HEAD, PARTS, OpenVlaOftNetwork
from nightshift.policies.openvla_oft.policy import OpenVlaOft
from nightshift.policies.precision import require_float32_where_trained
from nightshift.types import INSTRUCTION
from tests.policies import cases, goldens
from tests.policies.openvla_oft import golden, published

SHAPES = {"agentview": (64, 64, 3), "wrist": (64, 64, 3), "state": (8,), INSTRUCTION: ()}
SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published.write(tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="module")
def with_parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published.write(tmp_path_factory.mktemp("with_parts"), own_files=PARTS)


def settings(folder: Path, **changes: Any) -> config.OpenVlaOft:
    section = {
        "family": "openvla-oft",
        "inputs": ["agentview", INSTRUCTION],
        "variant": "simplevla-rl",
        "checkpoint": {"path": str(folder), "adapter": None, "unnorm_key": "libero_x", "range": "q01_q99"},
        "size": None,
        "max_tokens": 100,
        "chunk": 8,
        "head": "tokens",
        "dtype": "float32",
        "lora": None,
        "reuse_vision_features": False,
        "augmentation": {"crop": 0, "jitter": 0.0},
    }
    return config.OpenVlaOft.model_validate(config.merged(section, changes))


def load(folder: Path, **changes: Any) -> OpenVlaOft:
    policy = policies.fresh(settings(folder, **changes), SHAPES, 7)
    assert isinstance(policy, OpenVlaOft)
    return policy


def observations(count: int = 2) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "agentview": rng.integers(0, 256, (count, 64, 64, 3), np.uint8),
        "wrist": rng.integers(0, 256, (count, 64, 64, 3), np.uint8),
        "state": rng.standard_normal((count, 8), np.float32),
        INSTRUCTION: np.array(["lift the cube", "open the drawer"] * count)[:count],
    }


def test_every_weight_is_the_published_one_and_the_output_layer_has_the_rows_of_actions(written: Path) -> None:
    found = load(written).network.state_dict()
    assert torch.equal(found.pop(LM_HEAD), published.weights()[LM_HEAD][31744:32000])
    for name, tensor in found.items():
        assert torch.equal(tensor, published.weights()[name]), name


def test_goldens_hold_for_weights_that_went_through_a_checkpoint(tmp_path: Path) -> None:
    published.write(tmp_path, {n: t for n, t in golden.published_weights().items() if "proprio" not in n})
    with torch.device("meta"):
        built = OpenVlaOftNetwork(golden.spec())
    opened = PublishedCheckpoint.open(tmp_path)
    opened.check(built)
    opened.load(built, None)
    with torch.no_grad():
        found = golden.logits(built, golden.pixels()[:1], golden.prompt(0))
    torch.testing.assert_close(found[0], golden.tensor("oft_action_logits_0"), rtol=0, atol=golden.TOLERANCE)


def test_a_checkpoint_in_one_file_is_the_same(written: Path, tmp_path: Path) -> None:
    published.write(tmp_path, shards=1)
    (tmp_path / INDEX).unlink()
    (tmp_path / "model-00001-of-00001.safetensors").rename(tmp_path / "model.safetensors")
    one, other = load(tmp_path).state_dict(), load(written).state_dict()
    assert all(torch.equal(one[name], tensor) for name, tensor in other.items())


def test_two_cameras_the_state_vector_and_the_continuous_head_are_loaded(with_parts: Path) -> None:
    policy = load(with_parts, inputs=["agentview", "wrist", "state", INSTRUCTION], head="l1")
    own = published.parts()
    for part, module in (
        ("proprio_projector", policy.network.proprio_projector),
        ("action_head", policy.network.action_head),
    ):
        for name, tensor in module.state_dict().items():
            assert torch.equal(tensor, own[part][name]), name
    assert policy.act(observations()).shape == (2, 8, 7)


def test_the_vector_that_published_checkpoints_do_not_take_is_refused(with_parts: Path) -> None:
    """It has as many numbers as theirs."""
    shapes = {**SHAPES, "proprio": (8,), "state": (8,)}
    chosen = settings(with_parts, inputs=["agentview", "proprio", INSTRUCTION], head="l1")
    with (
        torch.device("meta"),
        pytest.raises(ConfigError, match="published checkpoints take robosuite's rotation") as refused,
    ):
        policies.fresh(chosen, shapes, 7)
    assert "write state in place of proprio" in refused.value.next_step


def test_constants_come_from_the_checkpoint(written: Path) -> None:
    policy = load(written)
    assert policy.pixel_mean.flatten().tolist()[:3] == published.PIXELS[0]["mean"]
    actions = published.statistics()["libero_x_no_noops"]["action"]
    policy.normalise_by({"actions": {"min": [-9.0] * 7, "max": [9.0] * 7}})
    assert policy.head.state_dict()["action_scale.bounds.low"].tolist() == pytest.approx(actions["q01"])


def test_a_loaded_policy_is_saved_and_loaded_without_the_checkpoint(written: Path, tmp_path: Path) -> None:
    policy = load(written)
    policies.save(policy, tmp_path)
    again = policies.load(tmp_path)
    assert again.spec == policy.spec
    assert (again.act(observations()) == policy.act(observations())).all()


def test_bfloat16_weights_are_the_rounded_ones(written: Path) -> None:
    wide, narrow = load(written), load(written, dtype="bfloat16")
    assert all(p.dtype == torch.bfloat16 for p in narrow.network.parameters())
    name = "projector.fc1.weight"
    assert torch.equal(narrow.network.state_dict()[name], wide.network.state_dict()[name].bfloat16())
    assert narrow.network.state_dict()[LM_HEAD].dtype == torch.bfloat16


def test_what_is_trained_beside_a_bfloat16_base_is_float32_as_it_was_published(with_parts: Path) -> None:
    """Rounded to bfloat16 it would lose what Adam's steps change."""
    lora = {"rank": 2, "alpha": 4.0, "targets": ["q_proj", "fc1"]}
    changes: dict[str, Any] = {"inputs": ["agentview", "wrist", "state", INSTRUCTION], "head": "l1", "lora": lora}
    policy = load(with_parts, **changes, dtype="bfloat16")
    require_float32_where_trained(policy)
    assert {p.dtype for p in policy.network.parameters() if not p.requires_grad} == {torch.bfloat16}
    for part, tensors in published.parts().items():
        own = getattr(policy.network, part).state_dict()
        assert all(torch.equal(own[name], tensor) for name, tensor in tensors.items()), part
    assert policy.act(observations()).shape == (2, 8, 7)


def test_a_policy_whose_projector_of_the_state_was_saved_in_bfloat16_is_loaded_in_float32(tmp_path: Path) -> None:
    written = published.write(tmp_path, own_files=["proprio_projector"])
    lora = {"rank": 2, "alpha": 4.0, "targets": ["q_proj"]}
    policy = load(written, inputs=["agentview", "state", INSTRUCTION], lora=lora, dtype="bfloat16")
    saved = policy.state_dict()
    name = "network.proprio_projector.fc1.weight"
    again = policies.build(policy.spec, {**saved, name: saved[name].bfloat16()})
    require_float32_where_trained(again)
    assert torch.equal(again.state_dict()[name], saved[name].bfloat16().float())


def write_adapter(folder: Path, modules: list[str], **changes: Any) -> dict[str, Tensor]:
    """A peft adapter of rank 4 and alpha 8; returns what it adds to each weight."""
    folder.mkdir()
    torch.manual_seed(2)
    tensors: dict[str, Tensor] = {}
    added: dict[str, Tensor] = {}
    for module in modules:
        weight = published.weights()[f"{module}.weight"]
        a, b = torch.randn(4, *weight.shape[1:]), torch.randn(len(weight), 4, *[1] * (weight.dim() - 2))
        tensors |= {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
        added[f"{module}.weight"] = 2.0 * torch.einsum("or,r...->o...", b.flatten(1), a)
    if LM_HEAD.removesuffix(".weight") in modules:  # peft's save_embedding_layers: auto
        tensors[f"base_model.model.{LM_HEAD.removesuffix('weight')}base_layer.weight"] = published.weights()[LM_HEAD]
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8, "peft_type": "LORA", **changes}))
    return added


ADAPTED = [
    "vision_backbone.featurizer.patch_embed.proj",
    "vision_backbone.fused_featurizer.blocks.0.attn.qkv",
    "vision_backbone.fused_featurizer.blocks.2.attn.qkv",
    "language_model.model.layers.1.mlp.down_proj",
    "language_model.lm_head",
]
"""A convolution, linear layers, one of them in a block that nothing reads, and the output layer."""


def test_an_adapter_is_merged_into_the_weights(written: Path, tmp_path: Path) -> None:
    added = write_adapter(tmp_path / "adapter", ADAPTED)
    found = load(written, checkpoint={"adapter": str(tmp_path / "adapter")}).network.state_dict()
    for name, tensor in found.items():
        rows = slice(31744, 32000) if name == LM_HEAD else slice(None)
        expected = published.weights()[name] + added.get(name, torch.zeros(()))
        torch.testing.assert_close(tensor, expected[rows], rtol=1e-5, atol=1e-5)


def test_the_adapter_that_training_saved_brings_the_modules_that_were_trained_whole(
    with_parts: Path, tmp_path: Path
) -> None:
    """From the published checkpoint and the folder `adapter` alone, the policy acts as the trained one."""
    shape: dict[str, Any] = {"inputs": ["agentview", "wrist", "state", INSTRUCTION], "head": "l1"}
    lora = {"rank": 2, "alpha": 4.0, "targets": ["q_proj", "fc1"]}
    trained = load(with_parts, **shape, lora=lora)
    torch.manual_seed(0)
    for parameter in trained.network.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    policies.save(trained, tmp_path)
    merged = load(with_parts, **shape, checkpoint={"adapter": str(tmp_path / "adapter")})
    np.testing.assert_allclose(merged.act(observations()), trained.act(observations()), rtol=0, atol=1e-4)
    assert np.abs(load(with_parts, **shape).act(observations()) - trained.act(observations())).max() > 1e-2


def test_the_action_head_of_ript_vla_beside_its_adapter_replaces_that_of_the_checkpoint(tmp_path: Path) -> None:
    written = published.write(tmp_path / "base", own_files=["action_head"])
    write_adapter(tmp_path / "adapter", ADAPTED)
    head = {name: torch.randn_like(tensor) for name, tensor in published.parts()["action_head"].items()}
    saved = {"action_header": {f"module.{name}": tensor for name, tensor in head.items()}, "scale_header": {}}
    torch.save(saved, tmp_path / "adapter" / RIPT_HEADS)
    shape: dict[str, Any] = {"variant": "ript-vla", "head": "l1"}
    policy = load(written, **shape, checkpoint={"adapter": str(tmp_path / "adapter")})
    found = policy.network.action_head.state_dict()
    assert found.keys() == head.keys() and all(torch.equal(found[name], head[name]) for name in head)
    torch.save({"scale_header": {}}, tmp_path / "adapter" / RIPT_HEADS)
    with pytest.raises(DataError, match=rf"{RIPT_HEADS} has no action_header"):
        load(written, **shape, checkpoint={"adapter": str(tmp_path / "adapter")})


def test_an_action_head_beside_an_adapter_is_refused_where_the_policy_has_tokens(written: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", ADAPTED)
    torch.save(published.parts()["action_head"], tmp_path / "adapter" / "action_head--7_checkpoint.pt")
    with (
        torch.device("meta"),
        pytest.raises(DataError, match=r"the action_head in .*adapter/action_head--7_") as refused,
    ):
        load(written, checkpoint={"adapter": str(tmp_path / "adapter")})
    assert "set policy.head: l1" in refused.value.next_step


def test_an_adapter_that_peft_saved_is_merged_as_peft_merges_it() -> None:
    base = cases.linear_and_convolution().state_dict()
    adapter = Adapter.open(goldens.FOLDER / "adapter", {name: tuple(tensor.shape) for name, tensor in base.items()})
    for name, tensor in base.items():
        merged = adapter.merged(name, tensor, None)
        torch.testing.assert_close(merged, goldens.tensor("lora", f"theirs.{name}"), rtol=0, atol=1e-6)
        assert (merged - tensor).abs().max() > 0.1


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def without(name: str) -> Callable[[Path], object]:
    return lambda folder: published.write(folder, {n: t for n, t in published.weights().items() if n != name})


def with_tensor(name: str, tensor: Tensor) -> Callable[[Path], object]:
    return lambda folder: published.write(folder, {**published.weights(), name: tensor})


def truncate(folder: Path) -> None:
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-100])


def as_folder(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


def with_llama(**fields: Any) -> Callable[[Path], object]:
    """In config.json."""
    return lambda folder: rewrite(
        folder / "config.json", lambda j: {**j, "text_config": {**j["text_config"], **fields}}
    )


def with_vocabulary(rows: int) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        shortened = {name: published.weights()[name][:rows] for name in (EMBEDDING, LM_HEAD)}
        published.write(folder, {**published.weights(), **shortened})

    return change


def with_tokenizer(**fields: Any) -> Callable[[Path], object]:
    return lambda folder: rewrite(folder / "tokenizer.json", lambda j: {"model": {**j["model"], **fields}})


def with_pieces(**ids: Any) -> Callable[[Path], object]:
    return with_tokenizer(vocab={**published.tokenizer_json()["model"]["vocab"], **ids})


def with_pixels(**fields: list[float]) -> Callable[[Path], object]:
    towers = [{**tower, **fields} for tower in published.PIXELS]
    return lambda folder: rewrite(folder / "preprocessor_config.json", lambda j: {"tvf_normalize_params": towers})


def list_of_norm_stats(folder: Path) -> None:
    (folder / "dataset_statistics.json").unlink()
    rewrite(folder / "config.json", lambda config_json: {**config_json, "norm_stats": [1]})


def changed_actions(**fields: Any) -> Callable[[Path], object]:
    def change(statistics: dict[str, Any]) -> dict[str, Any]:
        return {key: {**entry, "action": {**entry["action"], **fields}} for key, entry in statistics.items()}

    return lambda folder: rewrite(folder / "dataset_statistics.json", change)


LAYER = "language_model.model.layers.1.mlp.up_proj.weight"
EMBEDDING = "language_model.model.embed_tokens.weight"
TOWER = "vision_backbone.featurizer."
HEADS = r"text_config\.num_attention_heads is {} in the checkpoint's config\.json, and .* is expected"
BAD: dict[str, tuple[Callable[[Path], object], dict[str, Any], str]] = {
    "missing shard": (lambda f: (f / SHARD).unlink(), {}, rf"the shard .*{SHARD} is missing"),
    "truncated file": (truncate, {}, rf"{SHARD} is truncated or damaged"),
    "truncated part": (
        lambda f: (f / "proprio_projector--150000_checkpoint.pt").write_bytes(b"PK"),
        {},
        r"proprio_projector--150000_checkpoint\.pt is truncated or damaged",
    ),
    "RIPT-VLA's head for the scale": (
        lambda f: torch.save({"scale_trunk": {}, "log_b_head": {}}, f / "action_head--150000_checkpoint.pt"),
        {},
        r"scale_trunk in .*action_head--150000_checkpoint\.pt is a dict and no tensor",
    ),
    "a part that is a list": (
        lambda f: torch.save([torch.zeros(1)], f / "action_head--150000_checkpoint.pt"),
        {},
        r"action_head--150000_checkpoint\.pt is a list, and tensors by name are expected",
    ),
    "RIPT-VLA's file is a list": (
        lambda f: torch.save([torch.zeros(1)], f / RIPT_HEADS),
        {},
        rf"{RIPT_HEADS} is a list, and tensors by name are expected",
    ),
    "RIPT-VLA's head is a list": (
        lambda f: torch.save({"action_header": [torch.zeros(1)]}, f / RIPT_HEADS),
        {},
        rf"action_header of .*{RIPT_HEADS} is a list, and tensors by name are expected",
    ),
    "RIPT-VLA's head is nested": (
        lambda f: torch.save({"action_header": {"model": {"fc1": torch.zeros(1)}}}, f / RIPT_HEADS),
        {},
        rf"model in action_header of .*{RIPT_HEADS} is a dict and no tensor",
    ),
    "an action head, and tokens": (
        lambda f: published.write(f, own_files=["action_head"]),
        {},
        r"policy\.head is tokens, and the weights were trained with the action_head in .*action_head--150000_check",
    ),
    "RIPT-VLA's action head, and tokens": (
        lambda f: torch.save({"action_header": {}}, f / RIPT_HEADS),
        {},
        rf"policy\.head is tokens, and the weights were trained with the action_head in .*{RIPT_HEADS}",
    ),
    "a projector of the state, and no state": (
        lambda f: published.write(f, own_files=PARTS),
        {"head": "l1"},
        r"policy\.inputs has no state vector, and the weights were trained with the proprio_projector in .*--15",
    ),
    "FiLM": (
        lambda f: torch.save({}, f / "vision_backbone--150000_checkpoint.pt"),
        {},
        r"vision_backbone--150000_checkpoint\.pt is the vision backbone of FiLM, which this family does not have",
    ),
    "diffusion": (
        lambda f: torch.save({}, f / "noisy_action_projector--150000_checkpoint.pt"),
        {},
        r"noisy_action_projector--150000_checkpoint\.pt is the projector of noisy actions of the diffusion head, which",
    ),
    "a part of another name": (
        lambda f: torch.save({}, f / "value_head--150000_checkpoint.pt"),
        {},
        r"value_head--150000_checkpoint\.pt is a module, which this family does not have",
    ),
    "missing tensor": (without(LAYER), {}, rf"has no {LAYER}"),
    "other shape": (
        with_tensor(LAYER, torch.zeros(95, 64)),
        {},
        rf"{LAYER} has shape \[95, 64\] in .*, and \[96, 64\]",
    ),
    "unknown tensor": (
        with_tensor("value_head.weight", torch.zeros(1)),
        {},
        r"has value_head\.weight, which OpenVLA-OFT",
    ),
    "index lies": (
        lambda f: rewrite(f / INDEX, lambda j: {"weight_map": {**j["weight_map"], "ghost": SHARD}}),
        {},
        rf"{SHARD} lacks ghost",
    ),
    "no weights": (lambda f: (f / INDEX).unlink(), {}, r"has neither model\.safetensors nor"),
    "other architecture": (
        lambda f: rewrite(f / "config.json", lambda j: {**j, "model_type": "pi0"}),
        {},
        r"model_type is 'pi0' in the checkpoint's config\.json, and 'openvla' is expected",
    ),
    "other Llama": (
        lambda f: rewrite(f / "config.json", lambda j: {**j, "text_config": {"rms_norm_eps": 1e-5}}),
        {},
        r"text_config\.rms_norm_eps is 1e-05",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), {}, r"has no config\.json"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), {}, r"has no tokenizer\.json"),
    "no normalisation": (
        lambda f: rewrite(f / "preprocessor_config.json", lambda j: {}),
        {},
        r"preprocessor_config\.json of .* does not normalise",
    ),
    "config is a list": (
        lambda f: (f / "config.json").write_text("[]"),
        {},
        r"config\.json is no JSON object",
    ),
    "text_config is a list": (
        lambda f: rewrite(f / "config.json", lambda j: {**j, "text_config": [1]}),
        {},
        r"text_config in .*config\.json is no JSON object",
    ),
    "statistics are a list": (
        lambda f: (f / "dataset_statistics.json").write_text("[]"),
        {},
        r"dataset_statistics\.json is no JSON object",
    ),
    "statistics of a dataset are null": (
        lambda f: (f / "dataset_statistics.json").write_text('{"libero_x": null}'),
        {},
        r"libero_x in .*dataset_statistics\.json.* is no JSON object",
    ),
    "statistics of actions are a list": (
        lambda f: rewrite(f / "dataset_statistics.json", lambda j: {"libero_x": {"action": [1]}}),
        {},
        r"action in .*dataset_statistics\.json.* is no JSON object",
    ),
    "statistics are words": (changed_actions(q01=["a"] * 7), {}, r"q01 of action in .* is no list of finite numbers"),
    "a mask that is too short": (
        changed_actions(mask=[True] * 3),
        {},
        r"mask of action in .*dataset_statistics\.json.* has 3 dimensions, and q01 has 7",
    ),
    "norm_stats in the config are a list": (
        list_of_norm_stats,
        {},
        r"norm_stats in .*config\.json is no JSON object",
    ),
    "normalisation without std": (
        lambda f: rewrite(
            f / "preprocessor_config.json", lambda j: {"tvf_normalize_params": [{"mean": [1, 1, 1]}] * 2}
        ),
        {},
        r"preprocessor_config\.json of .* does not normalise .*tvf_normalize_params: mean and std",
    ),
    "index is a list": (lambda f: (f / INDEX).write_text("[]"), {}, rf"{INDEX} is no JSON object"),
    "index without weight_map": (
        lambda f: (f / INDEX).write_text("{}"),
        {},
        rf"weight_map in .*{INDEX} is no JSON object",
    ),
    "weight_map is a list": (
        lambda f: (f / INDEX).write_text('{"weight_map": []}'),
        {},
        rf"weight_map in .*{INDEX} is no JSON object",
    ),
    "weight_map without files": (
        lambda f: (f / INDEX).write_text('{"weight_map": {"a": 1}}'),
        {},
        rf"weight_map in .*{INDEX} names no file for a",
    ),
    "tokenizer is no UTF-8": (
        lambda f: (f / "tokenizer.json").write_bytes(b"\xff\xfe\x00"),
        {},
        r"tokenizer\.json is not JSON",
    ),
    "config is no UTF-8": (
        lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"),
        {},
        r"config\.json is not JSON",
    ),
    "shard is a folder": (as_folder(SHARD), {}, rf"{SHARD} cannot be read"),
    "another vocabulary": (
        with_vocabulary(32000),
        {},
        rf"{EMBEDDING} has shape \[32000, 64\] in .*, and \[32064, 64\] is expected",
    ),
    "no heads": (with_llama(num_attention_heads=0), {}, HEADS.format(0)),
    "heads are null": (with_llama(num_attention_heads=None), {}, HEADS.format(None)),
    "heads are a word": (with_llama(num_attention_heads="4"), {}, HEADS.format("'4'")),
    "heads that do not divide the width": (
        with_llama(num_attention_heads=5),
        {},
        rf"{EMBEDDING} has width 64 .*, and a multiple of 10 is expected: .* 5 heads",
    ),
    "heads of one number": (
        with_llama(num_attention_heads=64),
        {},
        rf"{EMBEDDING} has width 64 .*, and a multiple of 128 is expected: .* 64 heads",
    ),
    "heads that do not divide a tower": (
        with_tensor(f"{TOWER}blocks.0.mlp.fc1.weight", torch.zeros(40, 33)),
        {},
        rf"{TOWER}blocks\.0\.mlp\.fc1\.weight has width 33 .*, and a multiple of 16 is expected",
    ),
    "scaled positions": (
        with_llama(rope_scaling={"type": "linear", "factor": 4.0}),
        {},
        r"text_config\.rope_scaling is \{'type': 'linear', 'factor': 4\.0\} in .*config\.json, and None is expected",
    ),
    "an embedding without a width": (
        with_tensor(EMBEDDING, torch.zeros(64)),
        {},
        rf"{EMBEDDING} has shape \[64\] in the checkpoint, and 2 dimensions",
    ),
    "an empty embedding": (
        with_tensor(EMBEDDING, torch.zeros(32064, 0)),
        {},
        rf"{EMBEDDING} has shape \[32064, 0\] in the checkpoint, and 2 dimensions",
    ),
    "a layer without a width": (
        with_tensor(f"{TOWER}blocks.0.mlp.fc1.weight", torch.zeros(40)),
        {},
        rf"{TOWER}blocks\.0\.mlp\.fc1\.weight has shape \[40\] in the checkpoint, and 2 dimensions",
    ),
    "positions without a width": (
        with_tensor(f"{TOWER}pos_embed", torch.zeros(256)),
        {},
        rf"{TOWER}pos_embed has shape \[256\] in the checkpoint, and 3 dimensions",
    ),
    "registers without a width": (
        with_tensor(f"{TOWER}reg_token", torch.zeros(4)),
        {},
        rf"{TOWER}reg_token has shape \[4\] in the checkpoint, and 3 dimensions",
    ),
    "quantised weights": (
        with_tensor(LAYER, torch.zeros(96, 64, dtype=torch.int8)),
        {},
        rf"{LAYER} in .*\.safetensors is of type I8, and floating-point numbers are",
    ),
    "a quantised part": (
        lambda f: torch.save({"fc1.weight": torch.zeros(2, 2).int()}, f / "proprio_projector--1_checkpoint.pt"),
        {},
        r"fc1\.weight in .*proprio_projector--1_checkpoint\.pt is of type torch\.int32, and floating-point numbers are",
    ),
    "a byte-level tokenizer": (
        with_tokenizer(vocab={"a": 0, "\u0120": 1}),
        {},
        r"tokenizer\.json is not the tokenizer of the checkpoint: its model\.vocab has no <0x00>",
    ),
    "a unigram tokenizer": (
        with_tokenizer(vocab=[["a", 0.0]]),
        {},
        r"tokenizer\.json is not the tokenizer of the checkpoint: it has no model\.vocab",
    ),
    "merges are null": (
        with_tokenizer(merges=None),
        {},
        r"tokenizer\.json is not the tokenizer of the checkpoint: it has no .*model\.merges",
    ),
    "merges are numbers": (
        with_tokenizer(merges=[["t", 1]]),
        {},
        r"tokenizer\.json is not the tokenizer of the checkpoint: .*model\.merges has \['t', 1\]",
    ),
    "a token id that is a word": (with_pieces(a="x"), {}, r"the id of 'a' is 'x', and .* has 32064 embeddings"),
    "a token id below 0": (with_pieces(a=-1), {}, r"the id of 'a' is -1, and .* has 32064 embeddings"),
    "a token id without an embedding": (
        with_pieces(a=32064),
        {},
        r"tokenizer\.json .*: the id of 'a' is 32064, and the checkpoint has 32064 embeddings",
    ),
    "another id of the space": (
        with_pieces(**{"\u2581": 5}),
        {},
        r"tokenizer\.json is not Llama 2's tokenizer: the id of '\u2581' is 5, and 29871 is expected",
    ),
    "tokenizer is a folder": (as_folder("tokenizer.json"), {}, r"tokenizer\.json cannot be read: Is a directory"),
    "statistics are not numbers": (
        changed_actions(q01=[float("nan")] * 7),
        {},
        r"q01 of action in .*dataset_statistics\.json.* is no list of finite numbers",
    ),
    "statistics are infinite": (
        changed_actions(q99=[float("inf")] * 7),
        {},
        r"q99 of action in .*dataset_statistics\.json.* is no list of finite numbers",
    ),
    "statistics are infinite in float32": (
        changed_actions(q99=[1e39] * 7),
        {},
        r"q99 of action in .*dataset_statistics\.json.* is no list of finite numbers",
    ),
    "statistics are the wrong way round": (
        changed_actions(q01=[-1.0, 2.0, *[-1.0] * 5], q99=[1.0] * 7),
        {},
        r"q01 is above q99 in dimension 1 of action in .*dataset_statistics\.json",
    ),
    "normalisation by 0": (
        with_pixels(std=[0.5, 0.0, 0.5]),
        {},
        r"std of tvf_normalize_params in .*preprocessor_config\.json .* above 0",
    ),
    "normalisation by NaN": (
        with_pixels(mean=[float("nan")] * 3),
        {},
        r"mean of tvf_normalize_params in .*preprocessor_config\.json is no list of finite numbers",
    ),
    "unknown norm-stats key": (
        lambda f: None,
        {"checkpoint": {"unnorm_key": "bridge"}},
        "no statistics of bridge nor of bridge_no_noops; it has those of libero_x_no_noops",
    ),
    "no head": (
        lambda f: None,
        {"head": "l1"},
        r"has no action_head\.model\.layer_norm1\.weight",
    ),
    "a camera that is not there": (
        lambda f: None,
        {"inputs": ["overhead", INSTRUCTION]},
        r"policy\.inputs has overhead",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_checkpoint_that_does_not_fit_is_one_sentence_before_memory_is_taken(case: str, tmp_path: Path) -> None:
    spoil, changes, sentence = BAD[case]
    spoil(published.write(tmp_path))
    with torch.device("meta"), pytest.raises(NightshiftError, match=sentence) as refused:
        load(tmp_path, **changes)
    assert refused.value.next_step
    assert "\n" not in refused.value.what


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"use_dora": True}, "is not that of a plain LoRA adapter: it has use_dora"),
        ({"r": 0}, "is not that of a plain LoRA adapter: its r is 0, and has to be"),
        ({"r": "4"}, "is not that of a plain LoRA adapter: its r is 4, and has to be a whole number"),
        ({"lora_alpha": None}, "is not that of a plain LoRA adapter: its lora_alpha is None, and has to be a number"),
        ({"lora_alpha": float("nan")}, "is not that of a plain LoRA adapter: its lora_alpha is nan, and has to be"),
        ({"peft_type": "IA3"}, "is not that of a plain LoRA adapter: its peft_type is IA3"),
        ({"r": 8}, "with rank 4, and its adapter_config.json has r 8"),
    ],
)
def test_an_adapter_that_is_merged_otherwise_is_refused(
    written: Path, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    write_adapter(tmp_path / "adapter", ADAPTED, **changes)
    with torch.device("meta"), pytest.raises(NightshiftError, match=sentence):
        load(written, checkpoint={"adapter": str(tmp_path / "adapter")})


@pytest.mark.parametrize(
    ("text", "sentence"), [("[]", "is no JSON object"), ("{", "is not JSON"), ("\xff", "is not JSON")]
)
def test_a_damaged_file_of_an_adapter_is_one_sentence(written: Path, tmp_path: Path, text: str, sentence: str) -> None:
    write_adapter(tmp_path / "adapter", ADAPTED)
    (tmp_path / "adapter" / "adapter_config.json").write_bytes(text.encode("latin-1"))
    with torch.device("meta"), pytest.raises(NightshiftError, match=rf"adapter_config\.json {sentence}"):
        load(written, checkpoint={"adapter": str(tmp_path / "adapter")})


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_folder_in_place_of_a_file_of_an_adapter_is_one_sentence(written: Path, tmp_path: Path, name: str) -> None:
    write_adapter(tmp_path / "adapter", ADAPTED)
    as_folder(name)(tmp_path / "adapter")
    with torch.device("meta"), pytest.raises(NightshiftError, match=rf"{name} cannot be read"):
        load(written, checkpoint={"adapter": str(tmp_path / "adapter")})


def test_a_quantised_adapter_is_refused_by_tensor_and_type(written: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", ADAPTED)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({name: tensor.to(torch.int8) for name, tensor in load_file(file).items()}, file)
    with (
        torch.device("meta"),
        pytest.raises(
            NightshiftError,
            match=r"\.weight in .*adapter_model\.safetensors is of type I8, and floating-point numbers are",
        ),
    ):
        load(written, checkpoint={"adapter": str(tmp_path / "adapter")})


def test_an_adapter_of_another_checkpoint_is_refused_by_module_and_shape(written: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", ADAPTED)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    prefix = "base_model.model.language_model.model.layers.7.mlp.up_proj"
    save_file({f"{prefix}.lora_A.weight": torch.zeros(4, 64), f"{prefix}.lora_B.weight": torch.zeros(96, 4)}, file)
    with (
        torch.device("meta"),
        pytest.raises(NightshiftError, match=r"layers\.7\.mlp\.up_proj .* is not in the checkpoint"),
    ):
        load(written, checkpoint={"adapter": str(tmp_path / "adapter")})


def test_a_tensor_of_an_adapter_that_is_not_merged_is_refused_by_name(written: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", ADAPTED)
    name = "base_model.model.language_model.model.embed_tokens.weight"
    save_file({name: torch.zeros(4, 64)}, tmp_path / "adapter" / "adapter_model.safetensors")
    with (
        torch.device("meta"),
        pytest.raises(NightshiftError, match=rf"adapter_model\.safetensors has {name}, which is no"),
    ):
        load(written, checkpoint={"adapter": str(tmp_path / "adapter")})


def test_checking_reads_no_weights(written: Path) -> None:
    with torch.device("meta"):
        assert all(parameter.is_meta for parameter in load(written).network.parameters())
