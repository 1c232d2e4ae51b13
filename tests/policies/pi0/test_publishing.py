"""A trained pi0 goes back into openpi's layout, adapters merged, and comes from there again as the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from nightshift import config, files, policies
from nightshift.errors import DataError
from nightshift.policies import lora, on_base, publishing
from nightshift.policies.base import Policy
from nightshift.policies.checkpoint_files import read_headers
from nightshift.policies.pi0.policy import Pi0
from nightshift.types import INSTRUCTION
from tests.policies import examples
from tests.policies.pi0.test_policy import section

SHAPES = {"agentview": (32, 32, 3), "proprio": (4,), INSTRUCTION: ()}
LORA = {"rank": 2, "alpha": 4.0, "targets": ["q_proj", "down_proj", "action_out_proj"]}


def opened(settings: dict[str, object]) -> Policy:
    return policies.fresh(config.Pi0.model_validate(settings), SHAPES, 7)


def adapted(settings: dict[str, object]) -> Pi0:
    """With an adapter that changes something: a fresh one does not."""
    policy = opened({**settings, "lora": LORA})
    assert isinstance(policy, Pi0)
    torch.manual_seed(0)
    for _, layer in lora.adapters(policy.network):
        torch.nn.init.normal_(layer.lora_B, std=0.3)
    return policy


def test_an_adapter_is_saved_without_its_base_and_acts_on_it_to_the_bit(tmp_path: Path) -> None:
    policy = adapted(section(tmp_path, train="expert"))
    (tmp_path / "saved").mkdir()
    on_base.save(policy, tmp_path / "saved")
    assert not (tmp_path / "saved" / policies.WEIGHTS).exists()
    again, expected = policies.load(tmp_path / "saved").state_dict(), policy.state_dict()
    assert again.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.items())


def test_a_trained_adapter_is_merged_into_a_checkpoint_that_gives_the_same_actions(tmp_path: Path) -> None:
    settings = section(tmp_path, train="language_model")
    policy = adapted(settings)
    seen = {name: values for name, values in examples.observe(3).items() if name in SHAPES}
    before, expected = opened(settings).act(seen), policy.act(seen)
    with files.new_folder(tmp_path / "merged") as folder:
        publishing.publish(policy, publishing.base_of(policy), folder)
    assert read_headers(tmp_path / "merged")[0] == read_headers(tmp_path / "pi0")[0]
    again = opened({**settings, "checkpoint": {**settings["checkpoint"], "path": str(tmp_path / "merged")}})
    np.testing.assert_allclose(again.act(seen), expected, rtol=0, atol=1e-4)
    assert np.abs(before - expected).max() > 1e-2


def test_a_published_adapter_is_refused(tmp_path: Path) -> None:
    policy = opened(section(tmp_path))
    (tmp_path / "merged").mkdir()
    with pytest.raises(DataError, match=f"pi0 takes no published adapter, and {tmp_path} is one"):
        publishing.publish(policy, publishing.base_of(policy, adapter=tmp_path), tmp_path / "merged")
