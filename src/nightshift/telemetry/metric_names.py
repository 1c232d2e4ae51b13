"""Names of the metrics by which runs of the pipeline are compared; docs/models.md explains each.

They are on the parent run in MLflow. Rates are of the best candidate unless a name says another.
"""

from __future__ import annotations

SUCCESS = "success"
SUCCESS_LOW = "success_low"
SUCCESS_HIGH = "success_high"
EPISODES = "episodes"
INVALID = "invalid_episodes"
GAIN = "gain"
GAIN_LOW = "gain_low"
GAIN_HIGH = "gain_high"
GAIN_P_VALUE = "gain_p_value"
CHAMPION_SUCCESS = "champion_success"
CHAMPION_GAIN = "champion_gain"
GATE_P_VALUE = "gate_p_value"
PROMOTED = "promoted"

ALL = (
    *(SUCCESS, SUCCESS_LOW, SUCCESS_HIGH, EPISODES, INVALID),
    *(GAIN, GAIN_LOW, GAIN_HIGH, GAIN_P_VALUE),
    *(CHAMPION_SUCCESS, CHAMPION_GAIN, GATE_P_VALUE, PROMOTED),
)
"""Those with one name; the ones below have a name per candidate or task."""


def candidate_success(name: str) -> str:
    """Of a candidate. Example: candidate_success("sft") == "success/sft" """
    return f"{SUCCESS}/{name}"


def suite_success(suite: str) -> str:
    """Of the best candidate on a published suite, where it played several. Example: "suite_success/libero_goal" """
    return f"suite_success/{suite}"


def task_success(task: str) -> str:
    """Of the best candidate on a task. Example: task_success("lift_cube") == "task_success/lift_cube" """
    return f"task_success/{task}"
