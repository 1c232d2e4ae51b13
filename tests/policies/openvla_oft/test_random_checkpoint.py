"""scripts/random_checkpoint.py: what it writes loads as a published checkpoint does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from nightshift import config, envs, policies
from nightshift.policies.openvla_oft.tokenizer import LlamaTokenizer, read_llama
from scripts import random_checkpoint
from tests.policies.openvla_oft.test_stages import with_policy

TOWER = {"width": 32, "mlp": 40, "depth": 2, "heads": 16}
LLAMA = {"width": 64, "mlp": 96, "depth": 2, "heads": 4}
SIZE = {"image_size": 28, "dinov2": TOWER, "siglip": TOWER, "llama": LLAMA}
POLICY = {"head": "tokens", "inputs": ["agentview", "instruction"], "max_tokens": 24}


def test_what_it_writes_loads_and_decides(tmp_path: Path) -> None:
    random = with_policy(policy={**POLICY, "size": SIZE})
    random_checkpoint.write(tmp_path / "random", random, "cpu")
    where = {"path": str(tmp_path / "random"), "adapter": None, "unnorm_key": random.env.suite, "range": "q01_q99"}
    loading = with_policy(policy={**POLICY, "size": None, "checkpoint": where})
    assert isinstance(loading.policy, config.OpenVlaOft)
    shapes = {name: spec.shape for name, spec in envs.observation_space(loading.env).items()}
    policy = policies.fresh(loading.policy, shapes, random_checkpoint.ACTION_DIM)
    images = np.zeros((2, *shapes["agentview"]), np.uint8)
    inputs = policy.inputs({"agentview": images, "instruction": np.array(["reach near", "reach far"])})
    with torch.no_grad():
        actions = policy.decide(inputs, [np.random.default_rng(0), np.random.default_rng(1)], 1.0).actions
    assert actions.shape == (2, loading.policy.chunk, random_checkpoint.ACTION_DIM)
    assert torch.isfinite(actions).all()


def test_every_word_of_a_prompt_is_one_token(tmp_path: Path) -> None:
    random = with_policy(policy={**POLICY, "size": SIZE})
    random_checkpoint.write(tmp_path / "random", random, "cpu")
    tokens = LlamaTokenizer(read_llama(tmp_path / "random" / "tokenizer.json"))
    sentence = "take to reach near"
    assert len(tokens(sentence)) == len(sentence.split())
