"""Transitions of episodes in which somebody may take over: they are recorded control step by control step.

A transition begins at a step, with the C actions that were executed from there on, whoever chose them, and spans at
least these C steps: what a critic of chunks learns is the value of C actions that were really executed one after the
other, and of what the policy does from then on. With C = 1 that is one action.

    step         0   1   2   3   4   5   6   7   8
    who acts     P   P   P   H   H   H   P   P   P        policy, human
    C = 1, n = 3 from 1: steps 1 2 │    from 3: 3 4 5 │    from 5: 5 │
    C = 2, n = 2 from 1: steps 1 2 │    from 2: 2 3 (mixed), then 4 5 │

A return over more than C steps (`n_step`) ends at the border of an intervention, and the value of what the policy would
do there follows; or nothing, if a takeover counts as failure (`takeover_fails`). So the reward that a person gained is
not credited to an action of the policy before, and no next action is anybody's but the policy's.

The demonstrations get the steps of interventions whose C actions are all the person's. Nothing connects two of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nightshift import config
from nightshift.data.decisions import chunks, policy_inputs
from nightshift.data.episode import Episode
from nightshift.data.replay import TrajectoryBatch
from nightshift.errors import DataError
from nightshift.policies.base import Policy

Steps = NDArray[np.int64]
"""Numbers of control steps."""


def all_starts(episode: Episode, chunk: int) -> Steps:
    """The steps from which `chunk` actions were executed; a termination, and no time limit, may cut them short."""
    steps = episode.length - 1
    return np.arange(steps if episode.terminated else max(steps - chunk + 1, 0))


def intervention_starts(episode: Episode, chunk: int) -> Steps:
    """Those from which all of these actions are somebody else's than the policy's."""
    starts = all_starts(episode, chunk)
    flags, exists = chunks(episode.interventions[:-1, None], chunk)
    is_own: NDArray[np.bool_] = np.all(flags[..., 0] | ~exists, axis=1)
    return starts[is_own[starts]]


@dataclass(frozen=True, kw_only=True)
class Spans:
    """How many control steps a transition spans."""

    chunk: int
    n_step: int
    """Decisions of `chunk` steps whose rewards are summed up at most."""
    discount: float
    """Per control step."""
    takeover_fails: bool
    """Whether no value follows where somebody takes over from the policy."""

    def ends(self, episode: Episode, starts: Steps) -> Steps:
        """The step at which the policy decides again: after n_step decisions, at the first border of an intervention
        from the end of the chunk on, or where the episode ends."""
        steps = episode.length - 1
        flags = episode.interventions[:-1]
        borders = np.append(np.flatnonzero(flags[1:] != flags[:-1]) + 1, steps)
        border = borders[np.searchsorted(borders, np.minimum(starts + self.chunk, steps))]
        return np.asarray(np.minimum(np.minimum(starts + self.n_step * self.chunk, border), steps))

    def transitions(
        self, episode: Episode, number: int, policy: Policy, starts: Steps, *, imitate: config.Imitate
    ) -> TrajectoryBatch:
        """Those that begin at `starts`; `number` must be unique in the buffer. `imitate`: whether for cloning, too."""
        _check(episode, policy)
        ends = self.ends(episode, starts)
        executed, exists = chunks(episode.actions[:-1], self.chunk)
        chosen = np.where(episode.interventions[:-1, None], episode.actions[:-1], episode.policy_actions[:-1])
        at_end = ends == episode.length - 1
        is_terminal = (at_end & episode.terminated) | (_takeovers(episode, ends) & self.takeover_fails)
        return TrajectoryBatch(
            episode=np.full((len(starts), 1), number, np.int64),
            t=2 * starts[:, None],  # no row follows another: each spans steps of its own
            actions=executed[starts, None].astype(np.float32),
            rewards=self._returns(episode, starts, ends)[:, None],
            terminations=is_terminal[:, None],
            truncations=(at_end & episode.truncated)[:, None],
            frames=policy_inputs(episode, policy),
            curr=starts[:, None],
            next=ends[:, None],
            forward_inputs={
                "bc_actions": chunks(chosen, self.chunk)[0][starts, None].astype(np.float32),
                "bc_mask": (exists & (imitate != "none"))[starts, None],
                "bc_filter": (exists & (imitate == "better"))[starts, None],
                "discounts": (self.discount ** (ends - starts)).astype(np.float32)[:, None],
            },
            max_episode_length=episode.length - 1,
        )

    def _returns(self, episode: Episode, starts: Steps, ends: Steps) -> NDArray[np.float32]:
        """The discounted sums of rewards from each of `starts` to before its end."""
        rewards = episode.rewards[:-1].astype(np.float64)
        found = np.zeros(len(starts))
        for ahead in range(self.n_step * self.chunk):
            step = starts + ahead
            within = step < ends
            found[within] += self.discount**ahead * rewards[step[within]]
        return found.astype(np.float32)


def _takeovers(episode: Episode, ends: Steps) -> NDArray[np.bool_]:
    """Whether the policy acted before each of these steps, and somebody else from it on; nobody does at the end."""
    flags = episode.interventions
    return np.asarray(flags[ends] & ~flags[ends - 1] & (ends < episode.length - 1))


def _check(episode: Episode, policy: Policy) -> None:
    if episode.actions.shape[1:] != (policy.action_dim,):
        raise DataError(
            f"the episode {episode.label} has actions of {list(episode.actions.shape[1:])} numbers, and the policy "
            f"acts with {policy.action_dim}",
            "use episodes that were recorded step by step for this policy",
        )
