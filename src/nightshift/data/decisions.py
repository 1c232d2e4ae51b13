"""Episodes as an off-policy learner sees them: transitions from decision to decision of a policy.

A decision is a chunk of C actions. Its reward is the discounted sum over them, and the value of what follows is
discounted by C steps. With C = 1 a decision is a control step. What is stored of an observation are the policy's own
tensors, so that a batch is ready for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nightshift.data.episode import NO_POLICY, Episode, with_last
from nightshift.data.replay import TrajectoryBatch
from nightshift.data.tensors import Column
from nightshift.errors import DataError
from nightshift.policies.base import Policy, observation_dtype
from nightshift.types import INSTRUCTION, Provenance, Trajectory

CONTROL_STEPS = "control_steps"
"""In the metadata of an episode of decisions: how many steps the simulator made for it, also after its end."""


def solved_at_end(demo: Episode) -> Episode:
    """A demo with 1 at its end, which is success, and 0 before. Datasets of others may reward several steps, or every
    one, and not all of them say that success ends an episode."""
    rewards = np.zeros_like(demo.rewards)
    rewards[-2:-1] = 1.0  # of the last action: the last row is what it led to
    return replace(demo, rewards=rewards, terminated=True, truncated=False)


def decision_episode(trajectory: Trajectory, provenance: Provenance, discount: float) -> Episode:
    """An episode whose K steps are the decisions of a policy, with the chunk of each as one flat action [C · A].

    Success and unstable physics terminate it; the horizon truncates it. Actions that the end of the episode left
    unplayed repeat the last one. If somebody could take over, each step is a decision of one action.
    """
    chunk = trajectory.chunk
    decisions = -(-trajectory.length // chunk)
    terminated = trajectory.success or trajectory.unstable
    rewards = np.zeros(decisions + 1, np.float32)
    rewards[decisions - 1] = trajectory.success * discount ** ((trajectory.length - 1) % chunk)
    seen = {name: values for name, values in trajectory.observations.items() if name != INSTRUCTION}
    return Episode(
        observations={name: with_last(values, trajectory.final[name]) for name, values in seen.items()},
        actions=with_last(chunks(trajectory.executed, chunk, stride=chunk)[0].reshape(decisions, -1)),
        rewards=rewards,
        discounts=np.ones(decisions + 1, np.float32),
        interventions=with_last(_interventions(trajectory, decisions)),
        policy_actions=with_last(chunks(trajectory.actions, chunk, stride=chunk)[0].reshape(decisions, -1)),
        policy_versions=np.full(decisions + 1, trajectory.version, np.int64),
        terminated=terminated,
        truncated=not terminated,
        success=trajectory.success,
        provenance=provenance,
        metadata={"chunk": chunk, CONTROL_STEPS: trajectory.length},
    )


def _interventions(trajectory: Trajectory, decisions: int) -> NDArray[np.bool_]:
    return np.zeros(decisions, np.bool_) if trajectory.interventions is None else trajectory.interventions


def lost_episode(policy: Policy, provenance: Provenance, *, chunk: int) -> Episode:
    """One step without a transition, in the place of an episode of `chunk` actions per decision that the simulator
    failed in."""
    shapes = {name: shape for name, shape in policy.shapes.items() if name != INSTRUCTION}
    actions = np.zeros((1, chunk * policy.action_dim), np.float32)
    return Episode(
        observations={name: np.zeros((1, *shape), observation_dtype(shape)) for name, shape in shapes.items()},
        actions=actions,
        rewards=np.zeros(1, np.float32),
        discounts=np.ones(1, np.float32),
        interventions=np.zeros(1, np.bool_),
        policy_actions=actions,
        policy_versions=np.full(1, NO_POLICY, np.int64),
        terminated=False,
        truncated=True,
        success=False,
        provenance=provenance,
    )


def experience_transitions(episode: Episode, number: int, policy: Policy) -> TrajectoryBatch:
    """The transitions of an episode of decisions; `number` must be unique in the buffer."""
    steps, chunk = episode.length - 1, policy.chunk
    shape = (steps, chunk, policy.action_dim)
    if episode.actions.shape[1:] != (chunk * policy.action_dim,):
        raise DataError(
            f"the episode {episode.label} has actions of {list(episode.actions.shape[1:])} numbers, and the policy "
            f"decides on {chunk} × {policy.action_dim}",
            "use episodes of this policy",
        )
    columns = {
        "actions": episode.actions[:-1].reshape(shape),
        "rewards": episode.rewards[:-1],
        "forward_inputs": {
            "bc_actions": episode.policy_actions[:-1].reshape(shape),
            "bc_mask": np.zeros((steps, chunk), np.bool_),
            "bc_filter": np.zeros((steps, chunk), np.bool_),
        },
    }
    return _transitions(episode, number, policy, columns)


def demo_transitions(episode: Episode, number: int, policy: Policy) -> TrajectoryBatch:
    """Transitions of control steps, each with the chunk that begins there. Sampled with `n_step` C, they are those of
    decisions; a policy learns from every step of a demo, not from every C-th."""
    executed, mask = chunks(episode.actions[:-1], policy.chunk)
    chosen = np.where(episode.interventions[:-1, None], episode.actions[:-1], episode.policy_actions[:-1])
    columns = {
        "actions": executed.astype(np.float32),
        "rewards": episode.rewards[:-1].astype(np.float32),
        "forward_inputs": {
            "bc_actions": chunks(chosen, policy.chunk)[0].astype(np.float32),
            "bc_mask": mask,
            "bc_filter": np.zeros_like(mask),
        },
    }
    return _transitions(episode, number, policy, columns)


def _transitions(episode: Episode, number: int, policy: Policy, columns: dict[str, Any]) -> TrajectoryBatch:
    return TrajectoryBatch.from_episode_steps(
        policy_inputs(episode, policy),
        columns,
        episode=number,
        terminated=episode.terminated,
        truncated=episode.truncated,
    )


def policy_inputs(episode: Episode, policy: Policy) -> dict[str, Column]:
    """The policy's tensors of all observations. Images stay the episode's own arrays, which may be mapped files."""
    instruction = {INSTRUCTION: np.full(episode.length, episode.provenance.language)}
    seen = {**episode.observations, **instruction}
    tensors = policy.inputs({name: _policy_dtype(seen[name]) for name in policy.observations if name in seen})
    found = {name: tensor.numpy() for name, tensor in tensors.items()}
    return {name: seen[name] if _is_same(seen.get(name), values) else values for name, values in found.items()}


def _is_same(raw: Column | None, values: Column) -> bool:
    return raw is not None and raw.dtype == np.uint8 and raw.shape == values.shape


def _policy_dtype(values: Column) -> Column:
    return values.astype(np.float32) if values.dtype.kind == "f" else values


def chunks(actions: Column, chunk: int, stride: int = 1) -> tuple[Column, NDArray[np.bool_]]:
    """The chunk [C, A] that begins at every `stride`-th action, and which of its actions [C] there are.

    Beyond the end the last action is repeated.
    """
    starts = np.arange(0, len(actions), stride)
    indices = starts[:, None] + np.arange(chunk)
    return actions[np.minimum(indices, len(actions) - 1)], indices < len(actions)
