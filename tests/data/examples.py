"""Episodes to test with: one by hand, and a hypothesis strategy for any."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from nightshift.data import episode
from nightshift.data.episode import NO_POLICY, Episode
from nightshift.types import Provenance

SIZES = {"proprio": 8, "objects": 5}
PROVENANCE = Provenance(
    source="expert",
    suite="libero_mini",
    task="lift_cube",
    language="lift the cube",
    split="train",
    init_state=17,
    seed=0,
    versions={"mujoco": "3.3.7"},
    commit="abc1234",
)


def make(*, steps: int = 6, seed: int = 0, **changes: Any) -> Episode:
    """A solved episode of random content."""
    random = np.random.default_rng(seed)
    actions = random.uniform(-1, 1, (steps, 7)).astype(np.float32)
    rewards = np.zeros(steps, np.float32)
    rewards[max(steps - 2, 0)] = 1
    made = Episode(
        observations={name: random.standard_normal((steps, size)).astype(np.float32) for name, size in SIZES.items()},
        actions=actions,
        rewards=rewards,
        discounts=np.ones(steps, np.float32),
        interventions=np.zeros(steps, np.bool_),
        policy_actions=actions.copy(),
        policy_versions=np.full(steps, NO_POLICY, np.int64),
        terminated=True,
        truncated=False,
        success=True,
        provenance=PROVENANCE,
    )
    return replace(made, **changes)


def with_images(*, steps: int = 6, seed: int = 0, size: int = 8, **changes: Any) -> Episode:
    """As `make`, seen through two cameras as well, with interventions and free metadata."""
    random = np.random.default_rng(seed)
    plain = make(steps=steps, seed=seed)
    images = {name: random.integers(0, 256, (steps, size, size, 3), np.uint8) for name in ("front", "wrist")}
    interventions = random.random(steps) < 0.3
    return replace(
        plain,
        observations={**plain.observations, **images},
        interventions=interventions,
        policy_actions=np.where(interventions[:, None], -plain.actions, plain.actions),
        policy_versions=np.arange(steps, dtype=np.int64) // 3,
        extras={"force": random.standard_normal((steps, 3))},
        metadata={"operator": "left", "trial": seed},
        **changes,
    )


def assert_same(left: Episode, right: Episode) -> None:
    """Every array equal in dtype, shape and value, and everything else equal too."""
    assert episode.header(left) == episode.header(right)
    a, b = episode.columns(left), episode.columns(right)
    assert set(a) == set(b)
    for name, column in a.items():
        assert column.dtype == b[name].dtype, name
        np.testing.assert_array_equal(column, b[name], err_msg=name)


@st.composite
def episodes(draw: st.DrawFn, *, min_steps: int = 1, max_steps: int = 12) -> Episode:
    """Any sound episode; all that are drawn share one schema."""
    steps = draw(st.integers(min_steps, max_steps))
    terminated = draw(st.booleans())
    return with_images(
        steps=steps,
        seed=draw(st.integers(0, 2**32 - 1)),
        size=3,
        terminated=terminated,
        truncated=not terminated or draw(st.booleans()),
        success=draw(st.booleans()),
    )
