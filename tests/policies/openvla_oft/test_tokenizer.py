"""Prompts as token ids."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from nightshift.errors import ConfigError, DataError
from nightshift.policies import tokenizer
from nightshift.policies.openvla_oft.network import FIRST_ACTION_TOKEN, PAD
from nightshift.policies.openvla_oft.tokenizer import SPACE, HashTokenizer, LlamaTokenizer, Prompts, read_llama
from tests.policies import cases, goldens
from tests.policies.openvla_oft.published import tokenizer_json

ROWS = 400
"""Embeddings of a checkpoint."""


def test_merges_go_by_rank_and_not_from_left_to_right(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    pieces = ["\u2581", "a", "b", "c", "bc", "ab", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: number for number, piece in enumerate(pieces, 3)}
    path.write_text(json.dumps({"model": {"vocab": vocabulary, "merges": ["b c", "a b"]}}))
    words = LlamaTokenizer(tokenizer.read(path, ROWS, "take another"))
    assert words("abc") == [vocabulary["\u2581"], vocabulary["a"], vocabulary["bc"]]
    assert words("ab\n") == [vocabulary["\u2581"], vocabulary["ab"], vocabulary["<0x0A>"]]


def test_ids_are_those_of_the_tokenizers_library() -> None:
    """With a small vocabulary that the library learned, in the form of Llama 2's."""
    words = LlamaTokenizer(tokenizer.read(goldens.FOLDER / "tokenizer.json", ROWS, "take another"))
    expected = goldens.json("token_ids")
    assert {text: words(text) for text in expected} == expected
    assert set(expected) == set(cases.TEXTS)


def test_a_prompt_has_padding_first_and_a_lone_space_last(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    words = LlamaTokenizer(read_llama(tmp_path / "tokenizer.json"))
    for maker in (words, HashTokenizer()):
        rows = Prompts(maker, 120)(np.array(["Lift the cube", "open the top drawer"]))
        assert rows.shape == (2, 120)
        assert (rows[:, 0] == PAD).all()
        assert (rows[:, -1] == SPACE).all()
        assert (rows[0] == Prompts(maker, 120)(np.array(["lift the CUBE"]))[0]).all()


def test_hashed_words_are_no_action_tokens_and_differ() -> None:
    ids = HashTokenizer()(" ".join(f"word{number}" for number in range(2000)))
    assert len(set(ids)) > 1900
    assert min(ids) > 2
    assert max(ids) < min(SPACE, FIRST_ACTION_TOKEN)


def test_a_prompt_that_is_too_long_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"instruction 'lift the cube' has \d+ tokens, and the policy reads 5"):
        Prompts(HashTokenizer(), 5)(np.array(["lift the cube"]))


def test_a_tokenizer_that_is_missing_or_none_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no tokenizer\.json"):
        tokenizer.read(tmp_path / "tokenizer.json", ROWS, "take another")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"model in .*tokenizer\.json is no JSON object"):
        tokenizer.read(tmp_path / "tokenizer.json", ROWS, "take another")
