"""Acting: one policy on its device decides for all groups that a process plays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from nightshift.policies.arrays import to_array
from nightshift.policies.base import Policy, to_device
from nightshift.policies.device import out_of_memory_advice
from nightshift.rollouts.rollout import GroupPlay, Lanes
from nightshift.types import Array, Latents

Rows = Sequence[tuple[GroupPlay, Lanes]]
"""A batch: which episodes of which groups."""


class Actor:
    """`share_batches` False: every group is a batch of its own, with a row for each of its episodes, whether or not it
    ended. So its actions are the same bits whatever is played beside it. That is how the CPU acts.

    `share_batches` True: the episodes that go on, of all groups, are one batch. A GPU wastes most of its time on small
    batches. A row may then differ in its last bits with the rows beside it: the same groups in the same order give the
    same bits.
    """

    def __init__(self, policy: Policy, *, share_batches: bool) -> None:
        self._policy = policy
        self._batches = _merged if share_batches else _each

    @property
    def observations(self) -> Sequence[str]:
        """The names of what the policy sees."""
        return self._policy.observations

    def decide(self, groups: Sequence[GroupPlay]) -> None:
        """Give each of `groups` its next chunk of actions."""
        for rows in self._batches(groups):
            with torch.inference_mode(), out_of_memory_advice("machine.requests_at_once"):
                actions, log_probs, latents = self._act(rows)
            start = 0
            for group, lanes in rows:
                own = slice(start, start := start + len(lanes))
                of_group = {name: values[own] for name, values in latents.items()}
                group.decide(lanes, actions[own], log_probs[own], of_group)

    def _act(self, rows: Rows) -> tuple[Array, Array, Latents]:
        """Actions and log-probs [B, C, A], and latents: none where no update follows, as in an evaluation.

        Log-probs are zero for actions that are not sampled.
        """
        seen = [group.observe(lanes) for group, lanes in rows]
        observations = {name: np.concatenate([one[name] for one in seen]) for name in self._policy.observations}
        inputs = to_device(self._policy.inputs(observations), self._policy.device)
        request = rows[0][0].request
        if request.controller == "greedy":
            actions = self._policy.greedy(inputs)
            return to_array(actions.float()), np.zeros(actions.shape, np.float32), {}
        generators = [group.generators[lane] for group, lanes in rows for lane in lanes.tolist()]
        if request.controller == "random":
            shape = (self._policy.chunk, self._policy.action_dim)
            drawn = np.stack([generator.uniform(-1, 1, shape) for generator in generators]).astype(np.float32)
            return drawn, np.full_like(drawn, -np.log(2)), {}
        if request.split == "eval":
            actions, log_probs = self._policy.sample(inputs, generators, request.temperature)
            return to_array(actions.float()), to_array(log_probs.float()), {}
        actions, log_probs, latents = self._policy.decide(inputs, generators, request.temperature)
        recorded = {name: to_array(tensor) for name, tensor in latents.items()}
        return to_array(actions.float()), to_array(log_probs.float()), recorded


def _each(groups: Sequence[GroupPlay]) -> Iterator[Rows]:
    for group in groups:
        yield [(group, np.arange(group.request.count))]


def _merged(groups: Sequence[GroupPlay]) -> Iterator[Rows]:
    """One batch for all groups that act alike, in the order of the first of each."""
    alike: dict[tuple[str, float, str], list[tuple[GroupPlay, Lanes]]] = {}
    for group in groups:
        key = group.request.controller, group.request.temperature, group.request.split
        alike.setdefault(key, []).append((group, np.flatnonzero(group.active)))
    yield from alike.values()
