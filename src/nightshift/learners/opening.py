"""Choosing where the learner runs. A machine without Ray learns in the stage's own process."""

from __future__ import annotations

from nightshift import config
from nightshift.learners.base import Algorithm, Learners, LearnerSpec, Work_contra
from nightshift.learners.local import LocalLearner
from nightshift.policies import device
from nightshift.policies.snapshot import PolicySnapshot
from nightshift.project import packages


def learner_spec(
    machine: config.Machine, *, policy: PolicySnapshot, algorithm: Algorithm[Work_contra], seed: int
) -> LearnerSpec[Work_contra]:
    return LearnerSpec(
        policy=policy,
        algorithm=algorithm,
        seed=seed,
        microbatch_size=machine.microbatch_size,
        gradient_checkpointing=machine.gradient_checkpointing,
        compile=machine.compile,
        device=device.resolve(machine.device),
        strategy=machine.strategy,
        cpu_offload=machine.cpu_offload,
    )


def open_learners(spec: LearnerSpec[Work_contra], ranks: int, *, simulator_cpus: int = 0) -> Learners[Work_contra]:
    """`simulator_cpus`: that workers of this or a later stage ask of a Ray that is started here."""
    if ranks == 1 and spec.strategy != "fsdp":
        return LocalLearner(spec)
    packages.require(
        "ray",
        f"machine.ranks is {ranks} and machine.strategy {spec.strategy}",
        "set machine.ranks: 1 and machine.strategy: data_parallel in params.yaml",
    )
    from nightshift.learners.ranks import RayLearners

    return RayLearners(spec, ranks, simulator_cpus=simulator_cpus)
