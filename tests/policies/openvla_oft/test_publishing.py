"""A trained policy goes back into the published layout, adapters merged, and comes from there again as the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nightshift import files, policies
from nightshift.cli import model_commands
from nightshift.errors import DataError
from nightshift.policies import publishing
from nightshift.policies.base import Policy
from nightshift.policies.checkpoint_files import INDEX, SINGLE
from nightshift.policies.openvla_oft.network import LM_HEAD, PARTS
from nightshift.policies.openvla_oft.policy import OpenVlaOft
from nightshift.types import INSTRUCTION
from tests.conftest import make_project
from tests.policies import examples
from tests.policies.openvla_oft import published
from tests.policies.openvla_oft.test_checkpoint import ADAPTED, load, observations, write_adapter

LORA = {"rank": 2, "alpha": 4.0, "targets": ["q_proj", "down_proj", "qkv", "fc1"]}
SEES_ALL: dict[str, Any] = {"inputs": ["agentview", "wrist", "state", INSTRUCTION], "head": "l1"}
UNREAD = "vision_backbone.fused_featurizer.blocks.2.attn.qkv.weight"


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither transformers nor peft can be imported."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "peft", None)


def trained(source: Path, **changes: Any) -> OpenVlaOft:
    """With other weights wherever training changes them."""
    policy = load(source, **{"lora": LORA, **changes})
    torch.manual_seed(0)
    for name, parameter in policy.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3 if "lora_B" in name else 0.1)
    return policy


def publish(policy: Policy, folder: Path) -> Path:
    with files.new_folder(folder) as new:
        publishing.publish(policy, publishing.base_of(policy), new)
    return folder


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("changes", [{}, SEES_ALL], ids=["tokens", "two cameras, state and l1"])
def test_a_trained_adapter_is_merged_into_a_checkpoint_that_gives_the_same_actions(
    tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "_SHARD_BYTES", 10**6)
    source = published.write(tmp_path / "source", own_files=PARTS if changes else ())
    policy = trained(source, **changes)
    before, expected = load(source, **changes).act(observations()), policy.act(observations())
    folder = publish(policy, tmp_path / "merged")
    assert len(list(folder.glob("*.safetensors"))) > 2
    again = load(folder, **changes)
    np.testing.assert_allclose(again.act(observations()), expected, rtol=0, atol=1e-4)
    assert np.abs(before - expected).max() > 1e-2
    np.testing.assert_allclose(policy.act(observations()), expected, rtol=0, atol=1e-4)


def test_a_policy_that_reuses_vision_features_is_merged_too(tmp_path: Path) -> None:
    """Without the adapter its vision encoder would be trained, and such a policy is refused."""
    frozen_vision = {**LORA, "targets": ["q_proj", "down_proj"]}
    policy = trained(published.write(tmp_path / "source"), reuse_vision_features=True, lora=frozen_vision)
    expected = policy.act(observations())
    again = load(publish(policy, tmp_path / "merged"))
    np.testing.assert_allclose(again.act(observations()), expected, rtol=0, atol=1e-4)


def test_names_shapes_and_what_nothing_reads_are_those_of_the_source(tmp_path: Path) -> None:
    source = published.write(tmp_path / "source")
    folder = publish(trained(source), tmp_path / "merged")
    found, expected = tensors(folder), tensors(source)
    assert {name: tensor.shape for name, tensor in found.items()} == {name: t.shape for name, t in expected.items()}
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    assert weight_map.keys() == expected.keys()
    assert torch.equal(found[UNREAD], expected[UNREAD])
    assert torch.equal(found[LM_HEAD], expected[LM_HEAD])
    for name in ("config.json", "tokenizer.json", "preprocessor_config.json", "dataset_statistics.json"):
        assert (folder / name).read_bytes() == (source / name).read_bytes()


def test_a_checkpoint_in_one_file_becomes_one_file(tmp_path: Path) -> None:
    source = published.write(tmp_path / "source")
    weights = tensors(source)
    for file in (*source.glob("*.safetensors"), source / INDEX):
        file.unlink()
    save_file(weights, source / SINGLE)
    policy = trained(source)
    expected = policy.act(observations())
    folder = publish(policy, tmp_path / "merged")
    assert [file.name for file in folder.glob("*.safetensors*")] == [SINGLE]
    assert tensors(folder).keys() == weights.keys()
    np.testing.assert_allclose(load(folder).act(observations()), expected, rtol=0, atol=1e-4)


def test_an_adapter_beside_the_weights_of_the_source_is_not_copied_in_part(tmp_path: Path) -> None:
    source = published.write(tmp_path / "source")
    write_adapter(source / "lora_adapter", ADAPTED)
    (source / "lora_adapter" / "README.md").write_text("an adapter")
    (source / "notes").mkdir()
    (source / "notes" / "README.md").write_text("of the checkpoint")
    (source / "adapter_config.json").write_text("{}")
    folder = publish(trained(source), tmp_path / "merged")
    assert (folder / "notes" / "README.md").exists()
    assert not (folder / "lora_adapter").exists()
    assert not (folder / "adapter_config.json").exists()


def test_a_module_that_the_policy_lacks_is_taken_from_beside_the_adapter(tmp_path: Path) -> None:
    """For a policy that an older Nightshift loaded without it. What was trained with the adapter replaces what the
    checkpoint has."""
    source = published.write(tmp_path / "source")
    write_adapter(tmp_path / "adapter", ADAPTED)
    policy = trained(source, checkpoint={"adapter": str(tmp_path / "adapter")})
    published.write(source, own_files=["action_head"])
    head = {name: tensor + 1 for name, tensor in published.parts()["action_head"].items()}
    torch.save(head, tmp_path / "adapter" / "action_head--7_checkpoint.pt")
    folder = publish(policy, tmp_path / "merged")
    (found,) = folder.glob("action_head--*")
    assert found.read_bytes() == (tmp_path / "adapter" / found.name).read_bytes()


def test_an_adapter_of_the_source_is_merged_everywhere_also_where_nothing_here_reads(tmp_path: Path) -> None:
    """Published code chooses among all rows of the output layer."""
    source = published.write(tmp_path / "source")
    added = write_adapter(tmp_path / "adapter", ADAPTED)
    changes: dict[str, Any] = {"checkpoint": {"adapter": str(tmp_path / "adapter")}}
    policy = trained(source, **changes)
    expected = policy.act(observations())
    folder = publish(policy, tmp_path / "merged")
    np.testing.assert_allclose(load(folder).act(observations()), expected, rtol=0, atol=1e-4)
    found, before = tensors(folder), tensors(source)
    for name in (LM_HEAD, UNREAD):
        torch.testing.assert_close(found[name], before[name] + added[name], rtol=1e-5, atol=1e-5)


def test_a_bfloat16_policy_is_written_in_bfloat16_but_for_what_was_trained_whole(tmp_path: Path) -> None:
    source = published.write(tmp_path / "source", own_files=PARTS)
    policy = trained(source, **SEES_ALL, dtype="bfloat16")
    trained_whole = {name: t.clone() for name, t in policy.network.action_head.state_dict().items()}
    folder = publish(policy, tmp_path / "merged")
    assert tensors(folder)["projector.fc3.weight"].dtype == torch.bfloat16
    again = load(folder, **SEES_ALL, dtype="bfloat16").network.action_head.state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in trained_whole.items())


def test_weights_that_were_trained_themselves_come_back_to_the_bit(tmp_path: Path) -> None:
    policy = load(published.write(tmp_path / "source"))
    torch.nn.init.normal_(policy.network.get_parameter("projector.fc1.weight"))
    again = load(publish(policy, tmp_path / "out"))
    expected = policy.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())


def test_a_base_that_was_moved_is_named_and_another_one_is_refused(tmp_path: Path) -> None:
    source = published.write(tmp_path / "source")
    policy = trained(source)
    moved = source.rename(tmp_path / "moved")
    with pytest.raises(DataError, match="there is no checkpoint folder"):
        publish(policy, tmp_path / "out")
    assert publishing.base_of(policy, moved) == {"path": str(moved), "adapter": None}
    assert publishing.base_of(policy, moved, tmp_path) == {"path": str(moved), "adapter": str(tmp_path)}
    assert publishing.base_of(policy, None, tmp_path) == {"path": str(source), "adapter": str(tmp_path)}
    with pytest.raises(DataError, match="began with random weights"):
        publishing.base_of(examples.make("openvla-oft tokens"))
    with pytest.raises(DataError, match="of the family gaussian_mlp has no published layout"):
        publishing.base_of(examples.make("gaussian_mlp"))


def test_the_command_writes_a_policy_of_the_project_and_no_folder_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_project(tmp_path / "project")
    monkeypatch.chdir(root)
    policy = trained(published.write(tmp_path / "source"))
    with files.new_folder(root / "models" / "rloo") as folder:
        policies.save(policy, folder)
    (tmp_path / "source").rename(tmp_path / "moved")
    model_commands.export_policy("models/rloo", tmp_path / "out", tmp_path / "moved")
    np.testing.assert_allclose(load(tmp_path / "out").act(observations()), policy.act(observations()), atol=1e-4)
    with pytest.raises(DataError, match="already exists"):
        model_commands.export_policy("models/rloo", tmp_path / "out", tmp_path / "moved")


def test_of_a_policy_that_does_not_say_its_base_the_command_takes_the_adapter_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As an older Nightshift saved it: an adapter that was merged would be left out without a word."""
    root = make_project(tmp_path / "project")
    monkeypatch.chdir(root)
    source = published.write(tmp_path / "source")
    added = write_adapter(tmp_path / "adapter", ADAPTED)
    policy = trained(source, checkpoint={"adapter": str(tmp_path / "adapter")})
    with files.new_folder(root / "models" / "rloo") as folder:
        policies.save(policy, folder)
        spec = json.loads((folder / policies.SPEC).read_text())
        (folder / policies.SPEC).write_text(json.dumps({name: spec[name] for name in spec if name != "base"}))
    model_commands.export_policy("models/rloo", tmp_path / "without", source)
    assert "does not say what it began with" in capsys.readouterr().out
    model_commands.export_policy("models/rloo", tmp_path / "with", source, tmp_path / "adapter")
    assert "does not say" not in capsys.readouterr().out
    before = tensors(source)[UNREAD]
    assert torch.equal(tensors(tmp_path / "without")[UNREAD], before)
    torch.testing.assert_close(tensors(tmp_path / "with")[UNREAD], before + added[UNREAD], rtol=1e-5, atol=1e-5)
