"""The files in deploy/ start commands that exist, and state nothing that prefect.yaml or params.yaml states."""

from __future__ import annotations

import configparser
import re

import pytest
import typer
import yaml

from nightshift.cli.app import app
from tests.conftest import REPOSITORY

UNITS = sorted((REPOSITORY / "deploy").glob("*.service"))
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def unit_commands() -> list[list[str]]:
    found = []
    for path in UNITS:
        unit = configparser.ConfigParser(interpolation=None, strict=False)
        unit.optionxform = str  # type: ignore[assignment, method-assign]
        unit.read(path)
        found.append(unit["Service"]["ExecStart"].split())
    return found


def compose_commands() -> list[list[str]]:
    services = yaml.safe_load((REPOSITORY / "deploy" / "compose.yaml").read_text())["services"]
    return [service["command"] for service in services.values()]


@pytest.mark.parametrize("command", [*unit_commands(), *compose_commands()], ids=" ".join)
def test_a_service_starts_a_command_that_exists_with_options_that_it_has(command: list[str]) -> None:
    program, name, option, _ = command
    assert program.endswith(".venv/bin/nightshift")
    assert option in [known for parameter in COMMANDS[name].params for known in parameter.opts]


def test_when_a_run_begins_is_stated_once() -> None:
    files = [path for path in (REPOSITORY / "deploy").iterdir() if re.search("cron|OnCalendar", path.read_text())]
    assert files == []
    flows = [path for path in (REPOSITORY / "flows").glob("*.py") if re.search(r"\* \* \*", path.read_text())]
    assert flows == []
