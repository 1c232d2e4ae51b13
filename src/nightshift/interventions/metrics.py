"""How much a policy was helped: what should fall, or grow, as it learns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nightshift.data.episode import Episode
from nightshift.telemetry import interventions as names


def intervention_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Of a round of episodes that were recorded control step by control step."""
    flags = [episode.interventions[:-1] for episode in episodes]
    began = sum(int((one & ~np.append(False, one[:-1])).sum()) for one in flags)
    intervened, steps = sum(int(one.sum()) for one in flags), sum(len(one) for one in flags)
    return {
        names.PER_EPISODE: began / len(episodes),
        names.SHARE: intervened / steps,
        names.STEPS_BETWEEN: (steps - intervened) / max(began, 1),
        names.SUCCESS_ALONE: sum(e.success and not e.interventions.any() for e in episodes) / len(episodes),
    }
