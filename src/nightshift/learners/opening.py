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
        microbatch_tokens=machine.microbatch_tokens,
        gradient_checkpointing=machine.gradient_checkpointing,
        compile=machine.compile,
        device=device.resolve(machine.device),
        strategy=machine.strategy,
        cpu_offload=machine.cpu_offload,
    )


def open_learners(spec: LearnerSpec[Work_contra], machine: config.Machine) -> Learners[Work_contra]:
    if not machine.has_rank_processes:
        return LocalLearner(spec)
    require_ray(machine)
    from nightshift.learners.ranks import RayLearners

    return RayLearners(spec, machine.ranks, placement=machine.placement, simulator_cpus=machine.simulator_cpus)


def require_ray(machine: config.Machine) -> None:
    """Of a machine whose learners are processes of their own."""
    packages.require(
        "ray",
        f"machine.ranks is {machine.ranks}, machine.strategy {machine.strategy}, machine.placement {machine.placement}",
        "set machine.ranks: 1, machine.strategy: data_parallel and machine.placement: colocated in params.yaml",
    )
