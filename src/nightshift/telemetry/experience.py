"""Names of the metrics of `rlpd` about its experience; docs/rlpd.md has their meanings, and a test compares both."""

from __future__ import annotations

SUCCESS = "rollout/success"
LENGTH = "rollout/length"
INVALID = "rollout/invalid"
WEIGHT_AGE = "rollout/weight_age"
WEIGHT_AGE_SECONDS = "rollout/weight_age_seconds"
ENV_STEPS_PER_SECOND = "speed/env_steps_per_second"
GRADIENT_STEPS_PER_SECOND = "speed/gradient_steps_per_second"
DECISIONS = "replay/decisions"
EPISODES = "replay/episodes"
UTD_RATIO = "replay/utd_ratio"
ORDERED = "queue/ordered"
SPOOLED = "queue/spooled"
RECEIVED = "queue/received"
PUBLISHED_VERSION = "stream/version"
