"""What `nightshift predict` refuses before it loads a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from nightshift import envs
from nightshift.envs import fake
from nightshift.errors import ConfigError
from nightshift.pipeline.predict import predict


def test_more_episodes_than_a_task_has_held_out_states_are_refused_by_the_name_of_the_option(
    project_without_code: Path,
) -> None:
    available = envs.init_state_count(fake.TASKS[0], "eval")
    with pytest.raises(ConfigError, match=f"--episodes is {available + 1}, and near has {available} eval") as refused:
        predict(project_without_code, "champion", "near", available + 1)
    assert refused.value.next_step == f"--episodes {available}"
