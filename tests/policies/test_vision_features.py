"""Features of a frozen vision encoder: recorded with a decision, and taken by the update in the place of images."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nightshift import config, files, policies
from nightshift.algorithms.batch import collate, idle
from nightshift.algorithms.on_policy import Iteration, OnPolicyLearner
from nightshift.errors import ConfigError
from nightshift.policies import lora
from nightshift.policies.arrays import to_array, to_tensor
from nightshift.policies.base import Inputs
from nightshift.policies.openvla_oft.policy import OpenVlaOft
from nightshift.policies.pi0.policy import Pi0
from nightshift.policies.published import VISION_FEATURES, PublishedPolicy
from nightshift.project import paths
from nightshift.stages import sft
from nightshift.types import RolloutRequest, Trajectory
from tests.algorithms.test_on_policy import settings
from tests.policies import examples
from tests.policies.openvla_oft.test_policy import section

ROWS = 6
TEMPERATURE = 0.7
CAMERAS = {"agentview", "wrist"}
LANGUAGE_ALONE: lora.LoraSpec = {"rank": 2, "alpha": 4.0, "targets": ["q_proj", "down_proj", "fc3"]}
"""Layers of Llama and of the projector, which comes after the features."""
REQUEST = RolloutRequest(
    task="near", split="train", init_state=0, controller="sample", seed=0, count=2, temperature=TEMPERATURE
)


def make(family: str, *, reuse: bool = True) -> PublishedPolicy:
    torch.manual_seed(0)
    name, kind, *dtype = family.split()
    made: PublishedPolicy
    if name == "pi0":
        made = Pi0(**{**examples.PI0, **examples.FLOW[kind], "train": "expert", "reuse_vision_features": reuse})
    else:
        network = {**examples.NETWORK, "action_head": kind, "dtype": dtype[0] if dtype else "float32"}
        chosen = {"network": network, "lora": LANGUAGE_ALONE, "reuse_vision_features": reuse}
        made = OpenVlaOft(**{**examples.OPENVLA_OFT, **chosen})
    made.normalise_by(examples.STATISTICS)
    for parameter in made.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return made


@pytest.fixture(params=["openvla-oft tokens", "openvla-oft l1", "pi0 sde", "pi0 noise"])
def policy(request: pytest.FixtureRequest) -> PublishedPolicy:
    return make(request.param)


def count_images(policy: PublishedPolicy) -> list[int]:
    """Gets the number of rows of every pass of the vision encoder."""
    seen: list[int] = []
    policy.network.vision_encoder.register_forward_hook(lambda _, given, __: seen.append(len(given[0])))
    return seen


def without_images(seen: Any) -> dict[str, Any]:
    return {name: values for name, values in seen.items() if name not in CAMERAS}


def gradients(policy: PublishedPolicy, inputs: Inputs, actions: Tensor) -> list[Tensor]:
    """Log-probs, entropies, and the gradient of their sum for every weight that is trained."""
    log_probs, entropies = policy.evaluate_actions(inputs, actions, TEMPERATURE)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    found = torch.autograd.grad((log_probs + entropies).sum(), trained, allow_unused=True)
    return [log_probs, entropies, *(gradient for gradient in found if gradient is not None)]


def test_log_probs_and_gradients_on_recorded_features_are_those_on_images_bit_for_bit(policy: PublishedPolicy) -> None:
    seen = examples.observe(ROWS)
    inputs = policy.inputs(seen)
    with torch.no_grad():
        actions, sampled, latents = policy.decide(inputs, examples.generators(ROWS), TEMPERATURE)
    on_images = {**inputs, **{name: tensor for name, tensor in latents.items() if name != VISION_FEATURES}}
    expected = gradients(policy, on_images, actions)
    passes = count_images(policy)
    found = gradients(policy, policy.update_inputs(without_images(seen), latents), actions)
    assert passes == [], "the update runs the vision encoder"
    assert torch.equal(found[0], sampled)
    assert len(found) == len(expected) > 4
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    moved = {**latents, VISION_FEATURES: latents[VISION_FEATURES] + 1}
    others = policy.log_prob(policy.update_inputs(without_images(seen), moved), actions, TEMPERATURE)
    assert not torch.allclose(others, sampled), "log-probs do not depend on the features"


def test_recording_features_changes_neither_actions_nor_log_probs_and_runs_the_encoder_once() -> None:
    for family in ("openvla-oft tokens", "pi0 sde"):
        reusing, plain = make(family), make(family, reuse=False)
        passes = count_images(reusing)
        inputs = reusing.inputs(examples.observe(ROWS))
        with torch.no_grad():
            found, expected = (p.decide(inputs, examples.generators(ROWS), 1.0) for p in (reusing, plain))
        assert torch.equal(found.actions, expected.actions)
        assert torch.equal(found.log_probs, expected.log_probs)
        assert found.latents.keys() - expected.latents.keys() == {VISION_FEATURES}
        assert len(passes) == 1


def episode(policy: PublishedPolicy, *, member: int, success: bool) -> Trajectory:
    """As it comes from another process."""
    seen = examples.observe(3, seed=member)
    with torch.inference_mode():
        actions, log_probs, latents = policy.decide(policy.inputs(seen), examples.generators(3, member), TEMPERATURE)
    steps = [to_array(values).reshape(-1, examples.ACTION_DIM) for values in (actions, log_probs)]
    made = Trajectory(
        request=REQUEST,
        member=member,
        observations=seen,
        final={name: values[0] for name, values in seen.items()},
        actions=steps[0],
        executed=steps[0],
        log_probs=steps[1],
        latents={name: to_array(tensor) for name, tensor in latents.items()},
        chunk=examples.CHUNK,
        success=success,
    )
    received: Trajectory = pickle.loads(pickle.dumps(made))
    return received


def learner(policy: PublishedPolicy, **changes: Any) -> OnPolicyLearner:
    chosen = {"minibatch_size": 4, "epochs": 2, "target_kl": None, "kl.coef": 0.1, **changes}
    return OnPolicyLearner(policy, settings(**chosen), torch.Generator().manual_seed(0), microbatch_size=3)


@pytest.mark.parametrize("family", ["openvla-oft tokens", "pi0 sde"])
def test_an_update_on_recorded_features_sees_no_image_and_is_the_one_on_images(family: str) -> None:
    reusing, plain = make(family), make(family, reuse=False)
    played = [[[episode(p, member=m, success=m == 0) for m in range(2)]] for p in (reusing, plain)]
    passes = [count_images(reusing), count_images(plain)]
    metrics = [learner(p).update(Iteration(groups, 0.0)) for p, groups in zip((reusing, plain), played, strict=True)]
    assert passes[0] == [] and passes[1]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-3, abs=1e-6)
    start, expected = make(family).state_dict(), plain.state_dict()
    assert any(not torch.equal(tensor, start[name]) for name, tensor in expected.items()), "nothing was learned"
    for name, tensor in reusing.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-5, msg=name)


def test_the_critic_of_gae_sees_images_of_the_ends_of_episodes_alone() -> None:
    policy = make("openvla-oft tokens")
    groups = [[episode(policy, member=member, success=member == 0) for member in range(2)]]
    passes = count_images(policy)
    learner(policy, advantage_estimator="gae").update(Iteration(groups, 0.0))
    assert passes == [2], "one pass over the last observations of two episodes"


def test_images_are_not_read_from_the_record_of_a_decision() -> None:
    policy = make("openvla-oft tokens")
    one = episode(policy, member=0, success=True)
    batch = collate(policy, [one])
    assert batch.inputs.keys() == {"proprio", "instruction", VISION_FEATURES}
    assert policy.observations == [*policy.shapes] and CAMERAS.isdisjoint(policy.update_observations)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed, switching to BLAS")
def test_bfloat16_features_are_recorded_in_two_bytes_and_come_back_to_the_bit() -> None:
    policy = make("openvla-oft tokens bfloat16")
    one = episode(policy, member=0, success=True)
    assert one.latents[VISION_FEATURES].nbytes == 3 * 2 * 4 * 32 * 2, "decisions, cameras, patches, width, bytes"
    with torch.no_grad():
        expected = policy.see(policy.inputs(one.observations))
        batch = collate(policy, [one, one])
    found = batch.inputs[VISION_FEATURES]
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, torch.cat([expected, expected]))


def test_an_array_says_that_it_has_the_bits_of_a_bfloat16() -> None:
    values = torch.tensor([[1.5, -0.0, float("nan")], [3e38, 1e-40, -2.0]], dtype=torch.bfloat16)
    array = to_array(values)
    with pytest.raises(TypeError):
        array + 1
    again = to_tensor(np.concatenate([array, array[:1]]))
    assert again.dtype == torch.bfloat16
    assert torch.equal(again.view(torch.int16), torch.cat([values, values[:1]]).view(torch.int16))
    for plain in (torch.arange(4), torch.randn(2, 3), torch.tensor([1, -2], dtype=torch.int16)):
        assert torch.equal(to_tensor(to_array(plain)), plain)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed, switching to BLAS")
@pytest.mark.parametrize("family", ["openvla-oft tokens", "openvla-oft tokens bfloat16", "pi0 sde"])
def test_a_pass_that_counts_for_nothing_takes_features_as_an_update_does(family: str) -> None:
    policy = make(family)
    recorded, nothing = collate(policy, [episode(policy, member=0, success=True)]), idle(policy)
    assert {name: (t.shape[1:], t.dtype) for name, t in nothing.inputs.items()} == {
        name: (t.shape[1:], t.dtype) for name, t in recorded.inputs.items()
    }
    assert policy.log_prob(nothing.inputs, nothing.actions, 1.0).isfinite().all()


@pytest.mark.parametrize(
    "adapters",
    [None, {"rank": 2, "alpha": 4.0, "targets": ["q_proj", "qkv"]}, {"rank": 2, "alpha": 4.0, "targets": ["fc1"]}],
    ids=["all weights", "qkv", "fc1"],
)
def test_openvla_oft_refuses_to_reuse_features_of_a_vision_encoder_that_is_trained(adapters: Any) -> None:
    chosen = config.OpenVlaOft.model_validate(section(lora=adapters, reuse_vision_features=True))
    with pytest.raises(ConfigError, match=r"reuse_vision_features is true, and training changes the vision") as refused:
        policies.fresh(chosen, examples.SHAPES, examples.ACTION_DIM)
    assert "layers of the language model alone" in refused.value.next_step


def test_pi0_refuses_to_reuse_features_of_a_vision_encoder_that_is_trained() -> None:
    with pytest.raises(ConfigError, match=r"reuse_vision_features is true, and training changes the vision") as refused:
        Pi0(**{**examples.PI0, **examples.FLOW["sde"], "train": "all", "reuse_vision_features": True})
    assert "policy.train: expert" in refused.value.next_step


def test_a_section_of_params_chooses_it() -> None:
    chosen = config.OpenVlaOft.model_validate(section(lora=LANGUAGE_ALONE, reuse_vision_features=True))
    made = policies.fresh(chosen, examples.SHAPES, examples.ACTION_DIM)
    assert VISION_FEATURES in made.decide(made.inputs(examples.observe(2)), examples.generators(2), 1.0).latents


@pytest.mark.parametrize("reuse", [True, False])
def test_training_from_a_champion_may_choose_it_anew(
    reuse: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    champion, fresh = make("openvla-oft tokens", reuse=not reuse), make("openvla-oft tokens", reuse=reuse)
    with torch.no_grad():
        next(champion.parameters()).add_(1)
    with files.new_folder(paths.START) as folder:
        policies.save(champion, folder)
        (folder / paths.CHAMPION_VERSION).write_text("1")
    started = sft._start(fresh)
    assert started.spec == fresh.spec
    weights = champion.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in started.state_dict().items())
