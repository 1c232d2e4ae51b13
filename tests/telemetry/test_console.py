"""What is logged as a warning reaches a person."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_RUN = """
import logging
from pathlib import Path
from nightshift.project import environment
from nightshift.telemetry.console import show_warnings
environment.apply(Path.cwd(), own_prefect=True)
show_warnings()
import flows.pipeline
logging.getLogger("nightshift.learners.checkpoint").warning("step-00000012 is [damaged]")
logging.getLogger("nightshift.learners.checkpoint").info("not for people")
"""


def test_a_warning_is_one_line_on_stderr_though_prefects_output_is_silenced(tmp_path: Path) -> None:
    (tmp_path / ".state").mkdir()
    done = subprocess.run([sys.executable, "-c", _RUN], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == ["warning: step-00000012 is [damaged]"]
