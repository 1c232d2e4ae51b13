"""Playing episodes: the one loop in which a simulator meets whoever acts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nightshift.envs.base import Env
from nightshift.errors import UnstablePhysics
from nightshift.policies.base import Policy
from nightshift.policies.expert import Expert
from nightshift.types import ACTION_DIM, Array, Observation, RolloutRequest, Trajectory

Act = Callable[[Observation], tuple[Array, float]]
"""An action [A] for one observation, and its log-prob."""


def play(env: Env, request: RolloutRequest, policy: Policy | None, horizon: int) -> list[Trajectory]:
    """The group of episodes that `request` asks for, each with a random stream of its own."""
    return [
        _episode(env, request, member, _actor(env, request, member, policy), horizon) for member in range(request.count)
    ]


def _episode(env: Env, request: RolloutRequest, member: int, act: Act, horizon: int) -> Trajectory:
    observation, success = env.reset(request.split, request.init_state), False
    observations: list[Observation] = []
    actions: list[Array] = []
    log_probs, frames = [], []
    while not success and len(actions) < horizon:
        if request.frames_every and len(actions) % request.frames_every == 0:
            frames.append(env.render())
        action, log_prob = act(observation)
        observations.append(observation)
        actions.append(action)
        log_probs.append(log_prob)
        try:
            observation, success = env.step(action)
        except UnstablePhysics:
            break  # these actions led nowhere: the episode failed, the run goes on
    if request.frames_every:
        frames.append(env.render())
    pictures = [frame for frame in frames if frame is not None]
    return Trajectory(
        request=request,
        member=member,
        observations={name: np.stack([o[name] for o in observations]) for name in observation},
        actions=np.stack(actions),
        log_probs=np.array(log_probs, dtype=np.float32),
        success=success,
        frames=np.stack(pictures) if pictures else None,
    )


def _actor(env: Env, request: RolloutRequest, member: int, policy: Policy | None) -> Act:
    if request.controller == "expert":
        expert = Expert()
        return lambda observation: (expert.act(env.scene()), 0.0)
    if policy is None:
        raise ValueError(f"controller {request.controller!r} needs a policy")
    if request.controller == "greedy":
        return lambda observation: (policy.act(_batch_of_one(observation))[0], 0.0)
    random = np.random.default_rng([request.seed, member])
    return lambda observation: _draw(policy, observation, random)


def _draw(policy: Policy, observation: Observation, random: np.random.Generator) -> tuple[Array, float]:
    noise = random.standard_normal((1, ACTION_DIM), dtype=np.float32)
    actions, log_probs = policy.sample(_batch_of_one(observation), noise)
    return actions[0], float(log_probs[0])


def _batch_of_one(observation: Observation) -> Observation:
    return {name: values[None] for name, values in observation.items()}
