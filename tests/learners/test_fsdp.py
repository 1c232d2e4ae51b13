"""Ranks that share out a policy with FSDP2 make the updates of one process, and resume on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nightshift.algorithms.estimators import Groups
from nightshift.data.dataset_store import CloningSteps
from nightshift.learners import shards
from nightshift.learners.base import LearnerSpec, LearnerState
from nightshift.learners.local import LocalLearner
from nightshift.policies import lora
from nightshift.policies.heads import HeadPolicy
from nightshift.policies.openvla_oft.policy import OpenVlaOft
from nightshift.policies.snapshot import snapshot
from nightshift.types import INSTRUCTION, RolloutRequest, Trajectory
from tests.algorithms.test_on_policy import settings
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


def policy_of(family: str) -> HeadPolicy:
    name, _, adapters = family.partition(" + ")
    if not adapters:
        return examples.make(name)
    torch.manual_seed(0)
    network: Any = {**examples.NETWORK, "action_head": name.split()[1], "dtype": adapters.split()[0]}
    policy = OpenVlaOft(**{**examples.OPENVLA_OFT, "network": network, "lora": LORA})
    policy.normalise_by(examples.STATISTICS)
    for _, layer in lora.adapters(policy.network):
        nn.init.normal_(layer.lora_B, std=0.1)
    return policy


def seen_by(policy: HeadPolicy, count: int, seed: int) -> dict[str, Any]:
    return {name: values for name, values in examples.observe(count, seed).items() if name in policy.observations}


def episode(policy: HeadPolicy, *, member: int, success: bool, seed: int) -> Trajectory:
    length = 3 + 2 * member
    decisions = math.ceil(length / examples.CHUNK)
    seen = seen_by(policy, decisions, seed * 10 + member)
    with torch.no_grad():
        sampled = policy.sample(policy.inputs(seen), examples.generators(decisions, seed), TEMPERATURE)
    actions, log_probs = (tensor.numpy().reshape(-1, examples.ACTION_DIM)[:length] for tensor in sampled)
    return Trajectory(
        request=REQUEST,
        member=member,
        observations=seen,
        final={name: values[0] for name, values in seen.items()},
        actions=actions,
        executed=actions,
        log_probs=log_probs,
        chunk=examples.CHUNK,
        success=success,
    )


def groups(policy: HeadPolicy) -> Groups:
    return [
        [episode(policy, member=member, success=success, seed=seed) for member, success in enumerate(group)]
        for seed, group in enumerate(OUTCOMES)
    ]


def demos(policy: HeadPolicy, count: int = 5) -> CloningSteps:
    seen = {name: (np.asarray(values), np.arange(count)) for name, values in seen_by(policy, count, 7).items()}
    actions = examples.demo_actions(count).numpy()
    return CloningSteps(observations=seen, actions=actions, mask=np.array([[True, n % 2 > 0] for n in range(count)]))


def make_spec(policy: HeadPolicy, *, microbatch_size: int = 3, **changes: Any) -> LearnerSpec:
    chosen = {"minibatch_size": 9, "epochs": 1, "optimizer.learning_rate": 1e-3, "target_kl": None, **changes}
    return LearnerSpec(
        policy=snapshot(policy),
        settings=settings(**chosen),
        seed=0,
        demos=demos(policy) if chosen.get("bc_weight") else None,
        microbatch_size=microbatch_size,
        gradient_checkpointing=False,
        device=CPU,
        strategy="fsdp",
    )


def parts(played: Groups, ranks: int) -> list[Groups]:
    return [played[a:b] for a, b in pairwise(BOUNDS[ranks])]


def alone(
    spec: LearnerSpec, played: Groups, progress: Sequence[float] = PROGRESS, start: LearnerState | None = None
) -> tuple[LocalLearner, Mapping[str, float]]:
    """A learner of one process after some updates, and the metrics of the last."""
    learner = LocalLearner(spec)
    if start is not None:
        learner.restore(start)
    return learner, [learner.update([played], each) for each in progress][-1]


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, atol: float = 1e-5) -> None:
    """To a hundredth of a step of the optimizer: it divides gradients by their size, and the noise of tiny ones too."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        np.testing.assert_allclose(found[name].float(), tensor.float(), atol=atol, rtol=1e-4, err_msg=name)


EVERYTHING: dict[str, Any] = {"learn_std": True, "kl.coef": 0.5, "bc_weight": 2.0, "advantage_estimator": "gae"}
ADAPTERS = "openvla-oft tokens + float32"
MIXED_DTYPES = "openvla-oft l1 + bfloat16"
"""Adapters and the regression head are float32, the projector of the state vector is bfloat16, and all are trained."""


@pytest.mark.parametrize(
    ("family", "ranks", "changes"),
    [
        ("gaussian_mlp", 2, EVERYTHING),
        ("gaussian_mlp", 3, {}),
        ("vla", 2, {"kl.coef": 0.5, "bc_weight": 2.0}),
        (ADAPTERS, 3, {}),
    ],
)
def test_ranks_that_share_out_a_policy_make_the_updates_of_one(
    family: str, ranks: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Their parts of the data are unequal, and the third rank has none: it runs the policy all the same."""
    policy = policy_of(family)
    played = groups(policy)
    spec = make_spec(policy, **changes)
    results = sharded_ranks.run(Work(spec=spec, parts=parts(played, ranks), progress=PROGRESS, save=tmp_path))
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
