"""Instructions as numbers of their words."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nightshift.errors import ConfigError
from nightshift.policies.instruction import PADDING, WordEmbedding, encode
from nightshift.policies.vla import Vla
from nightshift.types import INSTRUCTION
from tests.policies.examples import SEES, VLA, make, make_policy, observe


def words(*texts: str, window: int = 6) -> list[list[int]]:
    numbers: list[list[int]] = encode(np.array(texts), window).tolist()
    return numbers


def test_words_are_hashed_without_case_and_punctuation_and_padded() -> None:
    first, second, empty = words("Lift the cube.", "lift THE cube", "")
    assert first == second
    assert len({*first[:3]}) == 3
    assert PADDING not in first[:3]
    assert first[3:] == [PADDING] * 3
    assert empty == [PADDING] * 6


def test_the_hash_of_a_word_never_changes() -> None:
    assert words("open the drawer", window=3) == [[36332, 356779, 19283]]


def test_words_that_share_a_row_of_one_table_have_different_embeddings() -> None:
    torch.manual_seed(0)
    embedded = WordEmbedding(8)(torch.tensor([[1024 + 1, 1024 + 2, 2048 + 1]]))[0]
    assert len({tuple(row) for row in embedded.tolist()}) == 3


def test_an_instruction_longer_than_the_window_is_one_sentence() -> None:
    with pytest.raises(ConfigError) as error:
        words("put the cube on the plate", window=5)
    assert error.value.what == (
        "the instruction 'put the cube on the plate' has 6 words, and the policy reads 5 (policy.max_words)"
    )
    assert "set policy.max_words in params.yaml to 6 or more" in error.value.next_step


@pytest.mark.parametrize("family", SEES)
def test_padding_has_no_influence(family: str) -> None:
    policy = make_policy(family)
    inputs = policy.inputs(observe(3))
    actions = policy.greedy(inputs)
    with torch.no_grad():
        for module in policy.modules():
            if isinstance(module, WordEmbedding):
                module.high.weight[PADDING] += 7
    torch.testing.assert_close(policy.greedy(inputs), actions, rtol=0, atol=1e-6)


def test_a_wider_window_gives_the_same_actions() -> None:
    narrow, wide = make("vla"), Vla(**{**VLA, "max_words": 12, "head": "gaussian"})
    weights = narrow.state_dict()
    position = wide.state_dict()["words.position"].clone()
    position[:, :6] = weights["words.position"]
    wide.load_state_dict({**weights, "words.position": position})
    np.testing.assert_allclose(wide.act(observe(3)), narrow.act(observe(3)), rtol=0, atol=1e-6)


def test_the_order_of_words_changes_what_the_vla_does() -> None:
    policy = make("vla")
    observations = observe(1)
    actions = [
        policy.act({**observations, INSTRUCTION: np.array([text])})
        for text in ("put the cube on the plate", "put the plate on the cube")
    ]
    assert np.abs(actions[0] - actions[1]).max() > 1e-6
