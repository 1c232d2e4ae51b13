"""How much better an episode went than could be expected."""

from __future__ import annotations

from torch import Tensor


def leave_one_out(returns: Tensor) -> Tensor:
    """RLOO: each return minus the mean of the others in its group. [groups, K] -> [groups, K], K at least 2."""
    _, members = returns.shape
    if members == 1:
        raise ValueError("leave-one-out needs groups of K >= 2 episodes: with one there is nobody to compare with")
    others = returns.sum(dim=1, keepdim=True) - returns
    return returns - others / (members - 1)
