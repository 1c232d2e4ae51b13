"""The family pi0: published weights behind the interface of policies."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from nightshift import config, policies
from nightshift.errors import NightshiftError
from nightshift.pipeline import precheck
from nightshift.pipeline.job import Job
from nightshift.policies.pi0.checkpoint import published_name
from nightshift.policies.pi0.images import resize_with_pad
from nightshift.policies.pi0.policy import Pi0
from nightshift.policies.pi0.prompt import Prompts
from nightshift.project import paths
from nightshift.stages import collect, dataset, rloo, sft
from tests.conftest import small_params
from tests.policies import examples
from tests.policies.openvla_oft.test_stages import HalfSolved
from tests.policies.pi0 import test_checkpoint as published

ROWS = 3
ADAPTERS = {
    "train": "language_model",
    "lora": {"rank": 2, "alpha": 4.0, "targets": ["q_proj", "down_proj"]},
    "reuse_vision_features": True,
}


def policy(**changes: Any) -> Pi0:
    torch.manual_seed(0)
    made = Pi0(**{**examples.PI0, **examples.FLOW["sde"], **changes})
    for parameter in made.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return made


def test_greedy_actions_are_the_first_of_what_the_network_denoises() -> None:
    made = policy()
    inputs = made.inputs(examples.observe(ROWS))
    with torch.no_grad():
        context, noisy = made.context(inputs), made.greedy_noise.expand(ROWS, 4, 5)
        for time in (1.0, 0.75, 0.5, 0.25):
            noisy = (
                noisy - 0.25 * made.network.velocity(context.state, noisy, torch.full((ROWS,), time), context.prefix)[0]
            )
        greedy = made.greedy(inputs)
    mean, std = (torch.tensor(examples.PI0["actions"][name]) for name in ("mean", "std"))
    torch.testing.assert_close(greedy, mean + std * noisy[:, :2, :3], rtol=0, atol=1e-6)
    proprio = torch.from_numpy(examples.observe(ROWS)["proprio"])
    expected = torch.tensor([[0.1, -0.2, 0.0, 0.3], [1.0, 0.5, 2.0, 0.01]])
    torch.testing.assert_close(context.state[:, :4], (proprio - expected[0]) / expected[1])
    assert not context.state[:, 4:].any()


def test_actions_that_are_relative_to_the_state_are_added_to_it_and_cloned_without_it() -> None:
    plain, relative = policy(), policy(delta_actions=True)
    inputs = plain.inputs(examples.observe(ROWS))
    moved = inputs["proprio"][:, None, :3]
    with torch.no_grad():
        torch.testing.assert_close(relative.greedy(inputs), plain.greedy(inputs) + moved)
        actions, mask = examples.demo_actions(ROWS, horizon=4), torch.ones(ROWS, 4, dtype=torch.bool)
        losses = [
            made.bc_loss(examples.cloning_inputs(made, ROWS), demos, mask)
            for made, demos in ((plain, actions), (relative, actions + moved))
        ]
    torch.testing.assert_close(*losses)


def test_only_the_expert_is_trained_where_that_is_asked_for() -> None:
    made = policy(train="expert")
    trained = {name for name, parameter in made.named_parameters() if parameter.requires_grad}
    assert made.frozen == {name for name, _ in made.named_parameters()} - trained
    assert all(name.startswith(("network.expert.", "network.action_", "network.state_proj.")) for name in trained)
    actions, mask = examples.demo_actions(ROWS, horizon=4), torch.ones(ROWS, 4, dtype=torch.bool)
    made.bc_loss(examples.cloning_inputs(made, ROWS), actions, mask).backward()  # type: ignore[no-untyped-call]
    assert {name for name, parameter in made.named_parameters() if parameter.grad is not None} == trained


def test_cloning_learns_from_all_actions_that_are_denoised_and_not_from_those_that_are_played_alone() -> None:
    made = policy()
    inputs, actions = examples.cloning_inputs(made, ROWS), examples.demo_actions(ROWS, horizon=4)
    mask = torch.ones(ROWS, 4, dtype=torch.bool)
    with torch.no_grad():
        loss = made.bc_loss(inputs, actions, mask)
        actions[:, 2:] += 1
        other = made.bc_loss(inputs, actions, mask)
    assert made.chunk == 2 and made.horizon == 4
    assert abs(loss.item() - other.item()) > 0.1


def test_a_critic_sees_the_state() -> None:
    made = policy()
    inputs = made.inputs(examples.observe(ROWS))
    moved = {**inputs, "proprio": inputs["proprio"] + 1}
    features, others = made.critic_features(inputs), made.critic_features(moved)
    assert features.shape == (ROWS, made.critic_size) == (ROWS, 40 + 4)
    torch.testing.assert_close(others - features, torch.cat([torch.zeros(40), 1 / made.state_std]).expand(ROWS, -1))


def test_a_prompt_is_bos_the_text_a_new_line_and_padding() -> None:
    vocabulary = {**examples.PI0["tokenizer"]["vocabulary"], "\u2581": 290, "l": 291, "i": 292, "li": 293, "\n": 108}
    prompts = Prompts({"vocabulary": vocabulary, "merges": ["l i"]}, 8)
    text = np.array([" li_l ", "l"])
    assert prompts(text).tolist() == [[2, 293, 290, 291, 108, 0, 0, 0], [2, 291, 108, 0, 0, 0, 0, 0]]
    with pytest.raises(NightshiftError, match=r"'llllllll' has 10 tokens, and the policy reads 8"):
        prompts(np.array(["l" * 8]))


def test_images_keep_their_proportions_and_are_padded_with_black() -> None:
    wide = torch.full((1, 16, 32, 3), 200, dtype=torch.uint8)
    padded = resize_with_pad(wide, 28)
    assert padded.shape == (1, 28, 28, 3)
    assert (padded[:, 7:21] == 200).all() and not padded[:, :7].any() and not padded[:, 21:].any()
    assert resize_with_pad(wide.new_full((1, 17, 32, 3), 200), 28)[0, :, 0].any(-1).sum() == 14, (
        "int(14.875), as openpi"
    )
    many = torch.randint(0, 256, (600, 4, 4, 3), dtype=torch.uint8)
    assert torch.equal(resize_with_pad(many, 6), torch.cat([resize_with_pad(one[None], 6) for one in many]))
    square = torch.randint(0, 256, (1, 28, 28, 3), dtype=torch.uint8)
    assert torch.equal(resize_with_pad(square, 28), square)


def section(folder: Path, **changes: Any) -> dict[str, Any]:
    """With a tiny checkpoint in `folder`, of 300 tokens and actions of the fake suite."""
    weights = published.weights()
    for name in (published.EMBEDDING, f"{published.PALIGEMMA}lm_head.weight"):
        weights[name] = torch.randn(300, 40, generator=torch.Generator().manual_seed(0))
    weights |= {name: torch.randn(7, 24) * 0.1 for name in ("action_out_proj.weight",)}
    weights |= {"action_out_proj.bias": torch.zeros(7), "action_in_proj.weight": torch.randn(24, 7)}
    weights["state_proj.weight"] = torch.randn(24, 10)
    published.write(folder / "pi0", weights)
    moments = {"mean": [0.0] * 10, "std": [1.0] * 10}
    (folder / "norm_stats.json").write_text(json.dumps({"norm_stats": {"state": moments, "actions": moments}}))
    model = {"vocab": examples.PI0["tokenizer"]["vocabulary"], "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model}))
    return {
        "family": "pi0",
        "inputs": ["agentview", "proprio", "instruction"],
        "checkpoint": {
            "path": str(folder / "pi0"),
            "norm_stats": str(folder / "norm_stats.json"),
            "tokenizer": str(folder / "tokenizer.json"),
            "delta_actions": False,
        },
        "horizon": 7,
        "max_tokens": 40,
        "chunk": 5,
        "denoising_steps": 3,
        **examples.FLOW["sde"],
        "train": "expert",
        "lora": None,
        "reuse_vision_features": False,
        "augmentation": {"crop": 0, "jitter": 0.0},
        **changes,
    }


def params(folder: Path, **changes: Any) -> config.Params:
    made = {
        "env": {"cameras": {"names": ["agentview"], "size": 32, "shadows": True}},
        "policy": section(folder, **changes),
        "sft": {"steps": 0},
        "rloo": {"iterations": 1, "groups": 2, "group_size": 4, "epochs": 1, "target_kl": None, "bc_weight": 0.1},
    }
    return config.Params.model_validate(config.merged(small_params(), made))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"inputs": ["agentview", "instruction"]}, r"pi0 takes one or more cameras, state vectors and the instruction"),
        ({"inputs": ["agentview", "instruction"]}, r"e\.g\. \[agentview, wrist, state, instruction\]"),
        ({"inputs": ["wrist", "proprio", "instruction"]}, r"policy\.inputs has wrist"),
        ({"max_tokens": 5}, r"prompt for the instruction 'reach near' has 14 tokens, and the policy reads 5"),
    ],
)
def test_what_does_not_fit_is_found_before_any_stage(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(NightshiftError, match=sentence):
        precheck.check_policy(params(tmp_path, **changes))


def test_statistics_that_are_missing_or_too_short_are_one_sentence(tmp_path: Path) -> None:
    made = params(tmp_path)
    (tmp_path / "norm_stats.json").write_text(json.dumps({"norm_stats": {"actions": {"mean": [0.0], "std": [1.0]}}}))
    with pytest.raises(
        NightshiftError, match=r"mean of actions in .*norm_stats\.json has 1 dimensions, and 7 are needed"
    ):
        precheck.check_policy(made)
    (tmp_path / "norm_stats.json").unlink()
    with pytest.raises(NightshiftError, match=r"there is no .*norm_stats\.json"):
        precheck.check_policy(made)


VOCABULARY = examples.PI0["tokenizer"]["vocabulary"]
OTHER_STATISTICS: dict[str, tuple[Any, str]] = {
    "a list": ([], r"norm_stats\.json is no JSON object"),
    "none": ({}, r"norm_stats in .*norm_stats\.json is no JSON object"),
    "of nothing": ({"norm_stats": {}}, r"norm_stats\.json has no actions"),
    "no moments": ({"norm_stats": {"actions": []}}, r"actions in .*norm_stats\.json is no JSON object"),
    "no std": ({"norm_stats": {"actions": {"mean": [0.0] * 7}}}, r"norm_stats\.json has no std of actions"),
    "null": (
        {"norm_stats": {"actions": {"mean": None, "std": None}}},
        r"mean of actions in .*json is no list of finite",
    ),
    "words": (
        {"norm_stats": {"actions": {"mean": ["a"] * 7, "std": [1.0] * 7}}},
        r"mean of actions in .*norm_stats\.json is no list of finite numbers",
    ),
    "not a number": (
        {"norm_stats": {"actions": {"mean": [float("nan")] * 7, "std": [1.0] * 7}}},
        r"mean of actions in .*norm_stats\.json is no list of finite numbers",
    ),
    "infinite": (
        {"norm_stats": {"actions": {"mean": [0.0] * 7, "std": [float("inf")] * 7}}},
        r"std of actions in .*norm_stats\.json is no list of finite numbers",
    ),
    "below 0": (
        {"norm_stats": {"actions": {"mean": [0.0] * 7, "std": [1.0, -1.0, *[1.0] * 5]}}},
        r"std of actions in .*norm_stats\.json is below 0 in dimension 1",
    ),
}


@pytest.mark.parametrize("case", OTHER_STATISTICS)
def test_a_file_of_other_statistics_is_one_sentence(tmp_path: Path, case: str) -> None:
    made = params(tmp_path)
    found, sentence = OTHER_STATISTICS[case]
    (tmp_path / "norm_stats.json").write_text(json.dumps(found))
    with pytest.raises(NightshiftError, match=sentence):
        precheck.check_policy(made)


@pytest.mark.parametrize("name", ["norm_stats.json", "tokenizer.json"])
def test_a_folder_in_place_of_a_file_is_one_sentence(tmp_path: Path, name: str) -> None:
    made = params(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(NightshiftError, match=rf"{name} cannot be read: Is a directory"):
        precheck.check_policy(made)


@pytest.mark.parametrize(
    ("vocabulary", "sentence"),
    [
        ({**VOCABULARY, "<pad>": 1}, r"PaliGemma's tokenizer: the id of '<pad>' is 1, and 0 is expected"),
        ({**VOCABULARY, "<bos>": 1}, r"PaliGemma's tokenizer: the id of '<bos>' is 1, and 2 is expected"),
        ({**VOCABULARY, "a": 300}, r": the id of 'a' is 300, and the checkpoint has 300 embeddings"),
        ({**VOCABULARY, "a": "x"}, r": the id of 'a' is 'x', and the checkpoint has 300 embeddings"),
        ({"<pad>": 0, "<bos>": 2}, r": its model\.vocab has no <0x00>"),
    ],
    ids=["another padding", "another start", "an id without an embedding", "an id that is a word", "no bytes"],
)
def test_the_tokenizer_of_another_model_is_one_sentence(
    tmp_path: Path, vocabulary: dict[str, Any], sentence: str
) -> None:
    made = params(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary, "merges": []}}))
    with pytest.raises(NightshiftError, match=rf"tokenizer\.json is not .*{sentence}") as refused:
        precheck.check_policy(made)
    assert "set policy.checkpoint.tokenizer" in refused.value.next_step


def test_weights_for_actions_of_fewer_numbers_are_one_sentence(tmp_path: Path) -> None:
    settings = config.Pi0.model_validate(section(tmp_path))
    shapes = {"agentview": (32, 32, 3), "proprio": (4,), "instruction": ()}
    with (
        torch.device("meta"),
        pytest.raises(
            NightshiftError, match=r"the checkpoint's actions have 7 numbers .*, and the environment's have 8"
        ),
    ):
        policies.fresh(settings, shapes, action_dim=8)


def test_pi05_sees_no_state_and_scales_actions_between_quantiles(tmp_path: Path) -> None:
    chosen = params(tmp_path, inputs=["agentview", "instruction"])
    assert isinstance(chosen.policy, config.Pi0)
    weights = published.weights({**published.SPEC, "state_dim": 0, "adaptive_norms": True, "vocabulary": 300})
    published.write(tmp_path / "pi05", weights)
    quantiles = {"q01": [-1.0, -2.0, 0.0, 0.0, 0.0], "q99": [1.0, 4.0, 1.0, 1.0, 1.0]}
    turned = {**quantiles, "q01": [-1.0, 5.0, 0.0, 0.0, 0.0]}
    statistics = {"norm_stats": {"state": quantiles, "actions": quantiles}}
    (tmp_path / "norm_stats.json").write_text(json.dumps(statistics))
    changed = chosen.policy.checkpoint.model_copy(update={"path": str(tmp_path / "pi05")})
    settings = chosen.policy.model_copy(update={"checkpoint": changed})
    shapes = {"agentview": (32, 32, 3), "proprio": (4,), "instruction": ()}
    made = policies.fresh(settings, shapes, action_dim=3)
    assert isinstance(made, Pi0)
    torch.testing.assert_close(made.action_mean, torch.tensor([0.0, 1.0, 0.5]), rtol=0, atol=1e-6)
    torch.testing.assert_close(made.action_std, torch.tensor([1.0, 3.0, 0.5]), rtol=0, atol=1e-6)
    inputs = made.inputs(examples.observe(ROWS))
    actions, log_probs, latents = made.decide(inputs, examples.generators(ROWS), 1.0)
    again, _ = made.evaluate_actions({**inputs, **latents}, actions, 1.0)
    assert actions.shape == (ROWS, 5, 3) and torch.equal(again, log_probs)
    (tmp_path / "norm_stats.json").write_text(json.dumps({"norm_stats": {"state": quantiles, "actions": turned}}))
    with pytest.raises(NightshiftError, match=r"q01 of actions in .*norm_stats\.json is above q99 in dimension 1"):
        policies.fresh(settings, shapes, action_dim=3)
    with pytest.raises(NightshiftError, match=r"pi0\.5 takes one or more cameras, no state vector and the instruction"):
        policies.fresh(settings.model_copy(update={"inputs": ("agentview", "proprio", "instruction")}), shapes, 3)


def test_the_vector_that_published_checkpoints_do_not_take_is_refused(tmp_path: Path) -> None:
    """It has as many numbers as theirs."""
    settings = config.Pi0.model_validate(section(tmp_path))
    shapes = {"agentview": (32, 32, 3), "proprio": (8,), "state": (8,), "instruction": ()}
    with torch.device("meta"):
        policies.fresh(settings.model_copy(update={"inputs": ("agentview", "state", "instruction")}), shapes, 7)
        with pytest.raises(NightshiftError, match="published checkpoints take robosuite's rotation, which is in state"):
            policies.fresh(settings, shapes, 7)


def test_actions_that_are_relative_to_the_state_need_one(tmp_path: Path) -> None:
    made = section(tmp_path)
    made["checkpoint"]["delta_actions"] = True
    shapes = {"agentview": (32, 32, 3), "proprio": (4,), "instruction": ()}
    with pytest.raises(NightshiftError, match=r"delta_actions is true, and the state has 4 numbers"):
        policies.fresh(config.Pi0.model_validate(made), shapes, action_dim=7)


def test_more_actions_than_are_denoised_cannot_be_played(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"chunk \(8\) is above horizon \(7\)"):
        params(tmp_path, chunk=8)


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("changes", [{}, ADAPTERS], ids=["expert", "adapters and recorded features"])
def test_published_weights_are_handed_on_and_reinforced(
    job: Callable[[str], Job], tmp_path: Path, changes: dict[str, Any]
) -> None:
    chosen = params(tmp_path, **changes)
    precheck.check_policy(chosen)
    collect.run(job("collect"), seed=0, env=chosen.env, states=chosen.states, collect=chosen.collect)
    dataset.run(job("dataset"), seed=0, dataset=chosen.dataset)
    sft.run(job("sft"), seed=0, policy=chosen.policy, sft=chosen.sft)
    start = policies.load(paths.SFT_POLICY)
    name = "expert.layers.0.mlp.up_proj.weight"
    assert torch.equal(start.state_dict()[f"network.{name}"], published.weights()[published_name(name)])
    with closing(HalfSolved(chosen.env)) as pool:
        playing = replace(job("rloo"), pool=lambda env: pool)
        rloo.run(playing, seed=0, env=chosen.env, states=chosen.states, rloo=chosen.rloo)
    (iteration,) = json.loads(paths.RLOO_HISTORY.read_text())["iterations"]
    assert abs(iteration["update/ppo_kl"]) < 1e-5, "update and rollout agree on log-probs"
    assert iteration["update/kl"] > 0, "nothing was learned"
