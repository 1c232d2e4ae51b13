"""Names of the metrics of `rlpd` about interventions; docs/rlpd.md has their meanings, and a test compares both."""

from __future__ import annotations

PER_EPISODE = "intervention/per_episode"
SHARE = "intervention/share"
STEPS_BETWEEN = "intervention/steps_between"
SUCCESS_ALONE = "intervention/success_alone"
