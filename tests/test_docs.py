"""What the pages show runs."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from nightshift import config
from nightshift.job import Job
from nightshift.stages import collect
from tests.conftest import REPOSITORY


@pytest.mark.usefixtures("project")
def test_the_program_on_the_page_about_data_runs(
    job: Callable[[str], Job], params: config.Params, capsys: pytest.CaptureFixture[str]
) -> None:
    collect.run(job("collect"), seed=params.seed, env=params.env, collect=params.collect)
    page = (REPOSITORY / "docs" / "data.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    scope: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/data.md", "exec"), scope)
    assert "'stream/acknowledged': 8.0" in capsys.readouterr().out
    assert len(scope["batch"]["actions"]) == 64  # type: ignore[index]
