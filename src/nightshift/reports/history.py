"""The history of a training stage, history.json in its policy folder: the only reader of that file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nightshift.errors import DataError
from nightshift.project import paths
from nightshift.statistics.intervals import Rate
from nightshift.telemetry import interventions

SAMPLED_SUCCESS = "rollout/success"
KL = "update/kl"


@dataclass(frozen=True, kw_only=True)
class History:
    """Example of the file: {"algorithm": "grpo", "iterations": [{"rollout/success": 0.6, "update/kl": 0.01}],
    "validation": [{"iteration": 0, "successes": 31, "episodes": 40}], "kept": 1, "kl_limit": 0.06}"""

    algorithm: str
    """Name for labels; empty if the file has none."""
    iterations: Sequence[Mapping[str, float]]
    """Metrics of iterations 1, 2, …"""
    validation: Mapping[int, Rate]
    """Greedy success on validation states, by iteration; iteration 0 is the policy that training started from."""
    kept: int
    """The iteration whose policy was handed on."""
    kl_limit: float | None = None
    """The KL at which an iteration's update ends; None if there is none."""
    control_hz: float | None = None
    """Control steps per second of the robot; None in a history that does not say it."""

    def metric(self, name: str) -> dict[int, float]:
        """By iteration, where it was logged."""
        return {i: metrics[name] for i, metrics in enumerate(self.iterations, start=1) if name in metrics}

    def interventions(self) -> dict[str, dict[int, float]]:
        """How much the policy was helped, in words for a chart and by iteration; empty if nobody could take over.
        At least: of an iteration without an intervention it is known that the policy made all these steps alone."""
        unit, rate = ("seconds", self.control_hz) if self.control_hz else ("control steps", 1.0)
        shown = {
            "interventions per episode": self.metric(interventions.PER_EPISODE),
            "intervened steps (%)": {i: 100 * share for i, share in self.metric(interventions.SHARE).items()},
            f"{unit} between interventions, at least": {
                i: steps / rate for i, steps in self.metric(interventions.STEPS_BETWEEN).items()
            },
        }
        return {words: values for words, values in shown.items() if values}


def read(folder: Path) -> History | None:
    """The history beside a policy; None if its training left none, as behaviour cloning."""
    path = folder / paths.HISTORY
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        return History(
            algorithm=content.get("algorithm", ""),
            iterations=content["iterations"],
            validation={v["iteration"]: Rate(v["successes"], v["episodes"]) for v in content["validation"]},
            kept=content["kept"],
            kl_limit=content.get("kl_limit"),
            control_hz=content.get("control_hz"),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f"{path} is damaged or not a history", f"rm -r {folder} and run again") from None
