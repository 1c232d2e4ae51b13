"""Ranks that share out a policy with FSDP2 make the updates of one process, and resume on any number of ranks."""

from __future__ import annotations

import io
import json
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path, PosixPath
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from nightshift import config, files
from nightshift.algorithms.estimators import Groups
from nightshift.algorithms.on_policy import Iteration
from nightshift.data.dataset_store import CloningSteps
from nightshift.errors import DataError
from nightshift.learners import checkpoint, shards
from nightshift.learners.algorithms import OnPolicy
from nightshift.learners.base import LearnerSpec, LearnerState
from nightshift.learners.checkpoint import Checkpoint
from nightshift.learners.local import LocalLearner
from nightshift.policies import lora
from nightshift.policies.base import Policy
from nightshift.policies.openvla_oft.policy import OpenVlaOft
from nightshift.policies.snapshot import snapshot
from nightshift.types import RolloutRequest, Trajectory
from tests.algorithms.test_on_policy import settings
from tests.conftest import REPOSITORY
from tests.learners import sharded_ranks
from tests.learners.sharded_ranks import Work
from tests.policies import examples

CPU = torch.device("cpu")
TEMPERATURE = 0.7
REQUEST = RolloutRequest(
    task="near", split="train", init_state=0, controller="sample", seed=0, count=4, temperature=TEMPERATURE
)
LORA: lora.LoraSpec = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj", "qkv", "fc1"]}
OUTCOMES = ([True, False], [False, True], [True, False])
BOUNDS = {1: [0, 3], 2: [0, 1, 3], 3: [0, 2, 3, 3]}
"""Of each rank's groups: the ranks have unequal parts, and the third has none."""
PROGRESS = (0.0, 0.5)


def policy_of(family: str) -> Policy:
    name, _, adapters = family.partition(" + ")
    if not adapters:
        return examples.make_policy(name)
    torch.manual_seed(0)
    dtype, _, reuses_features = adapters.partition(" ")
    network: Any = {**examples.NETWORK, "action_head": name.split()[1], "dtype": dtype}
    of_language = {"lora": {**LORA, "targets": ["q_proj", "fc3"]}, "reuse_vision_features": True}
    changes: Any = of_language if reuses_features else {"lora": LORA}
    policy = OpenVlaOft(**{**examples.OPENVLA_OFT, "network": network, **changes})
    policy.normalise_by(examples.STATISTICS)
    for _, layer in lora.adapters(policy.network):
        nn.init.normal_(layer.lora_B, std=0.1)
    return policy


def seen_by(policy: Policy, count: int, seed: int) -> dict[str, Any]:
    return {name: values for name, values in examples.observe(count, seed).items() if name in policy.observations}


def episode(policy: Policy, *, member: int, success: bool, seed: int) -> Trajectory:
    length = 3 + 2 * member
    decisions = math.ceil(length / examples.CHUNK)
    seen = seen_by(policy, decisions, seed * 10 + member)
    with torch.no_grad():
        *sampled, latents = policy.decide(policy.inputs(seen), examples.generators(decisions, seed), TEMPERATURE)
    actions, log_probs = (tensor.numpy().reshape(-1, examples.ACTION_DIM)[:length] for tensor in sampled)
    return Trajectory(
        request=REQUEST,
        member=member,
        observations=seen,
        final={name: values[0] for name, values in seen.items()},
        actions=actions,
        executed=actions,
        log_probs=log_probs,
        latents={name: tensor.numpy() for name, tensor in latents.items()},
        chunk=examples.CHUNK,
        success=success,
    )


def groups(policy: Policy) -> Groups:
    return [
        [episode(policy, member=member, success=success, seed=seed) for member, success in enumerate(group)]
        for seed, group in enumerate(OUTCOMES)
    ]


def demos(policy: Policy, count: int = 5) -> CloningSteps:
    seen = {name: (np.asarray(values), np.arange(count)) for name, values in seen_by(policy, count, 7).items()}
    actions = examples.demo_actions(count, horizon=policy.horizon).numpy()
    mask = np.array([[True] + [n % 2 > 0] * (policy.horizon - 1) for n in range(count)])
    return CloningSteps(observations=seen, actions=actions, mask=mask)


def make_spec(policy: Policy, *, microbatch_size: int = 3, **changes: Any) -> LearnerSpec[Iteration]:
    chosen = {"minibatch_size": 9, "epochs": 1, "optimizer.learning_rate": 1e-3, "target_kl": None, **changes}
    return LearnerSpec(
        policy=snapshot(policy),
        algorithm=OnPolicy(settings=settings(**chosen), demos=demos(policy) if chosen.get("bc_weight") else None),
        seed=0,
        microbatch_size=microbatch_size,
        gradient_checkpointing=False,
        compile=False,
        device=CPU,
        strategy="fsdp",
        cpu_offload=False,
    )


def updates(played: Groups, ranks: int, progress: Sequence[float] = PROGRESS) -> list[list[Iteration]]:
    """Of each update, the part of each rank."""
    return [[Iteration(played[a:b], each) for a, b in pairwise(BOUNDS[ranks])] for each in progress]


def alone(
    spec: LearnerSpec[Iteration],
    played: Groups,
    progress: Sequence[float] = PROGRESS,
    start: LearnerState | None = None,
) -> tuple[LocalLearner[Iteration], Mapping[str, float]]:
    """A learner of one process after some updates, and the metrics of the last."""
    learner = LocalLearner(spec)
    if start is not None:
        learner.restore(start)
    return learner, [learner.update(parts) for parts in updates(played, 1, progress)][-1]


KEY_BIAS = "queries_keys_values.bias"
"""The gradient of a key's bias is zero but for rounding, which the optimizer divides by its own size."""


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, atol: float = 1e-5) -> None:
    """To a hundredth of a step of the optimizer: it divides gradients by their size, and the noise of tiny ones too."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        if name.endswith(KEY_BIAS):
            continue
        np.testing.assert_allclose(found[name].float(), tensor.float(), atol=atol, rtol=1e-4, err_msg=name)


EVERYTHING: dict[str, Any] = {"learn_std": True, "kl.coef": 0.5, "bc_weight": 2.0, "advantage_estimator": "gae"}
ADAPTERS = "openvla-oft tokens + float32"
VISION_FEATURES = "openvla-oft tokens + float32 features"
"""Adapters of the language model and the projector; updates take recorded features in the place of images."""
BFLOAT16_BASE = "openvla-oft l1 + bfloat16"


@pytest.mark.parametrize(
    ("family", "ranks", "changes"),
    [
        ("gaussian_mlp", 2, EVERYTHING),
        ("gaussian_mlp", 3, {}),
        ("vla", 2, {"kl.coef": 0.5, "bc_weight": 2.0}),
        pytest.param("flow noise", 2, {"learn_std": True, "bc_weight": 2.0}, marks=pytest.mark.slow),
        ("pi0 sde", 3, {"kl.coef": 0.5}),
        (ADAPTERS, 3, {}),
        (VISION_FEATURES, 3, {"advantage_estimator": "gae"}),
    ],
)
def test_ranks_that_share_out_a_policy_make_the_updates_of_one(
    family: str, ranks: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Their parts of the data are unequal, and the third rank has none: it runs the policy all the same."""
    policy = policy_of(family)
    played = groups(policy)
    spec = make_spec(policy, **changes)
    results = sharded_ranks.run(Work(spec=spec, updates=updates(played, ranks, PROGRESS), save=tmp_path))
    single, metrics = alone(spec, played)
    assert_close(shards.read(tmp_path), single.state().tensors)
    assert len({result.microbatches for result in results}) == 1
    for result in results:
        assert result.metrics == pytest.approx(metrics, rel=1e-3, abs=1e-5)
        assert result.state.counters == pytest.approx(single.state().counters)
    whole = sum(parameter.numel() for parameter in policy.parameters())
    held = [result.held for result in results]
    assert sum(held) == whole
    assert max(held) < 0.6 * whole
    assert_close(results[0].policy.tensors(), single.policy().tensors())
    assert not any(result.policy.weights for result in results[1:]), "only rank 0 keeps what was gathered"


def recipe_of_simplevla_rl() -> dict[str, Any]:
    """What its update on several GPUs is set to."""
    rloo = config.read_yaml(REPOSITORY / "recipes" / "simplevla_rl_8_gpus.yaml")["rloo"]
    return {name: value for name, value in rloo.items() if name != "sampling"}


def in_bfloat16(played: Groups) -> Groups:
    """With log-probs as a worker on a GPU would have rounded them."""

    def rounded(log_probs: Any) -> Any:
        return torch.from_numpy(log_probs).bfloat16().float().numpy()

    return [[replace(each, log_probs=rounded(each.log_probs)) for each in group] for group in played]


def assert_moments_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Adam's first moments are sums of gradients. Weights are not compared: where a gradient is hardly more than
    rounding, Adam makes a whole step of it."""
    assert found.keys() == expected.keys()
    moments = [name for name in expected if name.endswith(".exp_avg")]
    assert moments
    for name in moments:
        size = float(expected[name].abs().max())
        assert size > 0, name
        np.testing.assert_allclose(found[name], expected[name], atol=1e-4 * size, rtol=0, err_msg=name)


def test_two_ranks_make_the_update_of_one_with_all_weights_of_openvla_oft_and_the_recipe_of_simplevla_rl(
    tmp_path: Path,
) -> None:
    policy = policy_of("openvla-oft tokens")
    played = in_bfloat16(groups(policy))
    spec = make_spec(policy, **recipe_of_simplevla_rl())
    as_there = replace(spec, gradient_checkpointing=True)
    results = sharded_ranks.run(Work(spec=as_there, updates=updates(played, 2, PROGRESS[:1]), save=tmp_path))
    single, metrics = alone(spec, played, PROGRESS[:1])
    found, expected = shards.read(tmp_path), single.state().tensors
    assert_moments_close(found, expected)
    assert len([name for name in found if name.endswith(".exp_avg")]) == len(list(policy.parameters()))
    assert metrics["update/rollout_deviation"] > 1e-3, "recomputed log-probs are not those of the rollouts"
    for result in results:
        assert result.metrics == pytest.approx(metrics, rel=1e-3, abs=1e-5)


def saved_on_two(spec: LearnerSpec[Iteration], played: Groups, folder: Path) -> LearnerState:
    """The state that two ranks checkpointed after the first update."""
    results: list[sharded_ranks.Result] = []

    def write(into: Path) -> Mapping[str, str]:
        results.extend(sharded_ranks.run(Work(spec=spec, updates=updates(played, 2, PROGRESS[:1]), save=into)))
        return {name: digest for result in results for name, digest in result.sums.items()}

    checkpoint.save(folder, Checkpoint(step=1, tensors={}, state={}), write)
    sums = json.loads((folder / "step-00000001" / files.MANIFEST).read_text())["sha256"]
    assert {f"shards/{name}" for name in ("__0_0.distcp", "__1_0.distcp", ".metadata")} < sums.keys()
    newest = checkpoint.newest(folder)
    assert newest is not None
    return LearnerState(tensors=newest.tensors, counters=results[0].state.counters, shards=newest.shards)


@pytest.mark.parametrize(("family", "changes"), [("gaussian_mlp", EVERYTHING), (ADAPTERS, {})])
def test_saved_on_two_ranks_and_resumed_on_one_and_on_three_training_ends_as_if_it_had_not_been_interrupted(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    policy = policy_of(family)
    played = groups(policy)
    spec = make_spec(policy, **{"optimizer.warmup_steps": 20, **changes})
    uninterrupted, _ = alone(spec, played)
    expected = uninterrupted.state()
    start = saved_on_two(spec, played, tmp_path)
    on_one, _ = alone(spec, played, PROGRESS[1:], start)
    assert_close(on_one.state().tensors, expected.tensors)
    assert on_one.state().counters == pytest.approx(expected.counters)
    last = tmp_path / "three"
    on_three = Work(spec=spec, updates=updates(played, 3, PROGRESS[1:]), start=start, save=last)
    results = sharded_ranks.run(on_three)
    assert_close(shards.read(last), expected.tensors)
    assert results[0].state.counters == pytest.approx(expected.counters)


def test_a_checkpoint_of_one_process_is_resumed_by_sharded_ranks(tmp_path: Path) -> None:
    policy = policy_of("gaussian_mlp")
    played = groups(policy)
    spec = make_spec(policy, advantage_estimator="gae")
    first, _ = alone(spec, played, PROGRESS[:1])
    work = Work(spec=spec, updates=updates(played, 2, PROGRESS[1:]), start=first.state(), save=tmp_path)
    sharded_ranks.run(work)
    first.update(*updates(played, 1, PROGRESS[1:]))
    assert_close(shards.read(tmp_path), first.state().tensors)


@pytest.mark.parametrize(
    ("family", "changes", "atol"),
    [
        ("vla", "cpu_offload,gradient_checkpointing", 1e-5),
        (ADAPTERS, "cpu_offload,gradient_checkpointing", 1e-5),
        # Compiled code adds in an order of each CPU: a tenth of a step.
        pytest.param("vla", "compile,gradient_checkpointing", 1e-4, marks=pytest.mark.slow),
    ],
)
def test_offloading_recomputing_and_compiling_change_nothing(
    family: str, changes: str, atol: float, tmp_path: Path
) -> None:
    policy = policy_of(family)
    played = groups(policy)
    spec = make_spec(policy)
    turned_on: dict[str, Any] = dict.fromkeys(changes.split(","), True)
    sharded_ranks.run(Work(spec=replace(spec, **turned_on), updates=updates(played, 2, PROGRESS[:1]), save=tmp_path))
    single, _ = alone(spec, played, PROGRESS[:1])
    assert_close(shards.read(tmp_path), single.state().tensors, atol=atol)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed, switching to BLAS")
def test_beside_a_bfloat16_base_all_that_is_trained_is_float32_and_ranks_make_the_update_of_one(tmp_path: Path) -> None:
    """One decision at a time: how bfloat16 rounds depends on the size of a batch."""
    policy = policy_of(BFLOAT16_BASE)
    played = groups(policy)
    spec = make_spec(policy, microbatch_size=1, learn_std=True)
    results = sharded_ranks.run(Work(spec=spec, updates=updates(played, 2, PROGRESS[:1]), save=tmp_path))
    single, metrics = alone(spec, played, PROGRESS[:1])
    found, expected = shards.read(tmp_path), single.state().tensors
    assert_close(found, expected)
    assert {tensor.dtype for name, tensor in found.items() if "exp_avg" in name} == {torch.float32}
    assert any(parameter.dtype == torch.bfloat16 for parameter in policy.parameters())
    assert results[0].metrics == pytest.approx(metrics, rel=1e-3, abs=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("cpu_offload", [False, True])
def test_on_a_gpu_a_sharded_policy_keeps_float32_weights_and_makes_the_update_of_one_process_to_bfloat16(
    cpu_offload: bool, tmp_path: Path
) -> None:
    """One rank, so that one GPU is enough: gathering, precision and offloading are those of several."""
    policy = policy_of("vla")
    played = groups(policy)
    spec = replace(make_spec(policy), device=torch.device("cuda"), cpu_offload=cpu_offload)
    (result,) = sharded_ranks.run(Work(spec=spec, updates=updates(played, 1, PROGRESS[:1]), save=tmp_path))
    single, metrics = alone(spec, played, PROGRESS[:1])
    found, expected = shards.read(tmp_path), single.state().tensors
    assert {name: tensor.dtype for name, tensor in found.items()} == {name: t.dtype for name, t in expected.items()}
    assert result.metrics == pytest.approx(metrics, rel=0.1, abs=1e-2)


def test_the_metadata_of_a_checkpoint_calls_no_function(tmp_path: Path) -> None:
    class Call:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "called",)

    (tmp_path / shards.METADATA).write_bytes(pickle.dumps(Call()))
    with pytest.raises(DataError, match=r"names pathlib\.Path\.touch"):
        shards.read(tmp_path)
    assert not (tmp_path / "called").exists()


class OldEnum:
    """As Python before 3.11.4 pickles a member of an enumeration; of anything else it would be an attribute."""

    def __init__(self, kind: Any, name: str) -> None:
        self._kind = kind
        self._name = name

    def __reduce__(self) -> Any:
        return getattr, (self._kind, self._name)


def test_the_metadata_of_a_checkpoint_may_be_of_an_older_python_and_reaches_no_attribute(tmp_path: Path) -> None:
    member = pickle.dumps(OldEnum(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT"))
    assert shards._Unpickler(io.BytesIO(member)).load() is _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    (tmp_path / shards.METADATA).write_bytes(pickle.dumps(OldEnum(PosixPath, "touch")))
    with pytest.raises(DataError, match=r"names attribute touch of <class 'pathlib\.PosixPath'>"):
        shards.read(tmp_path)


def test_a_checkpoint_with_a_missing_shard_is_set_aside_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def write(folder: Path) -> Mapping[str, str]:
        folder.mkdir()
        for rank in range(2):
            (folder / f"__{rank}_0.distcp").write_bytes(b"part")
        return {}

    for step in (1, 2):
        checkpoint.save(tmp_path, Checkpoint(step=step, tensors={}, state={}), write)
    (tmp_path / "step-00000002" / "shards" / "__1_0.distcp").unlink()
    newest = checkpoint.newest(tmp_path)
    assert newest is not None
    assert newest.step == 1
    assert "shards/__1_0.distcp is missing; training goes on from step 1" in caplog.text
