"""The files in deploy/ start commands that exist, and state nothing that prefect.yaml or params.yaml states."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from sqlalchemy.engine import make_url

from nightshift.cli.app import app
from nightshift.project import paths
from tests.conftest import REPOSITORY, make_project
from tests.ports import free_port
from tests.servers import stop
from tests.waiting import wait_until

DEPLOY = REPOSITORY / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def read_unit(path: Path) -> configparser.ConfigParser:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(path)
    return unit


def unit_commands() -> list[list[str]]:
    return [read_unit(path)["Service"]["ExecStart"].split() for path in UNITS]


def compose_commands() -> list[list[str]]:
    return [service["command"] for service in services().values()]


def services() -> dict[str, Any]:
    """Of both compose files."""
    files = [yaml.safe_load((DEPLOY / name).read_text()) for name in ("compose.yaml", "production.yaml")]
    return {name: service for file in files for name, service in file["services"].items()}


def commands_of(program: str) -> list[list[str]]:
    """Without the program itself."""
    found = [*unit_commands(), *compose_commands()]
    return [rest for first, *rest in found if first.endswith(f".venv/bin/{program}")]


@pytest.mark.parametrize("command", commands_of("nightshift"), ids=" ".join)
def test_a_service_starts_a_command_that_exists_with_options_that_it_has(command: list[str]) -> None:
    name, option, _ = command
    assert option in [known for parameter in COMMANDS[name].params for known in parameter.opts]


def test_mlflow_is_started_with_accounts_and_with_options_that_it_has() -> None:
    from mlflow.cli import server

    unit, compose = commands_of("mlflow")
    assert unit == compose
    options = {known for parameter in server.params for known in parameter.opts}
    assert {word for word in unit if word.startswith("--")} <= options
    assert " ".join(unit).startswith("server --app-name basic-auth --host 127.0.0.1 ")


def test_nothing_listens_beyond_loopback() -> None:
    for service in services().values():
        assert service["network_mode"] == "host"
        assert "ports" not in service
    commands = " ".join(word for command in compose_commands() for word in command)
    assert re.findall(r"listen_addresses=(\S+)|--host (\S+)|--port (\d+\.\S+)", commands) == [
        ("127.0.0.1", "", ""),
        ("", "", "127.0.0.1:7070"),
        ("", "127.0.0.1", ""),
    ]


def test_files_that_compose_mounts_or_reads_exist_or_are_made_from_an_example() -> None:
    for service in services().values():
        for file in service.get("env_file", []):
            name = file if isinstance(file, str) else file["path"]
            assert (DEPLOY / f"{name}.example").is_file()
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists()


def test_env_files_with_secrets_are_ignored_by_git() -> None:
    names = ["deploy/nightshift.env", "deploy/mlflow.env"]
    ignored = subprocess.run(
        ["git", "check-ignore", *names], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert ignored.stdout.split() == names


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed (apt-get install systemd)")
def test_systemd_understands_every_line_of_the_units(tmp_path: Path) -> None:
    for program in ("nightshift", "mlflow"):
        path = tmp_path / "nightshift/.venv/bin" / program
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o755)
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    command = ["systemd-analyze", "--user", "verify", "--man=no", *map(str, UNITS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_compose_files_are_valid_by_the_specification_and_a_misspelt_key_would_not_be(tmp_path: Path) -> None:
    files = [DEPLOY / "compose.yaml", DEPLOY / "production.yaml"]
    assert validated(*files).returncode == 0
    content = yaml.safe_load(files[0].read_text())
    next(iter(content["services"].values()))["restrat"] = "unless-stopped"
    (tmp_path / "compose.yaml").write_text(yaml.safe_dump(content))
    refused = validated(tmp_path / "compose.yaml")
    assert refused.returncode == 1 and "restrat" in refused.stdout


def validated(*files: Path) -> subprocess.CompletedProcess[str]:
    """Against the JSON schema of the Compose specification, which the tool brings along."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


HEALTH = {"nightshift.service": "api/health", "nightshift-ui.service": "health"}
"""nightshift-mlflow.service needs PostgreSQL and S3: tests/test_production.py."""


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTH)
def test_a_unit_starts_in_the_environment_that_systemd_gives_it_answers_and_ends_cleanly(
    name: str, tmp_path: Path
) -> None:
    service = read_unit(DEPLOY / name)["Service"]
    root = make_project(tmp_path / "nightshift")
    (root / paths.STATE).mkdir()  # as `make setup` does
    port = free_port()
    command = re.sub(r"--port \d+", f"--port {port}", service["ExecStart"].replace("%h", str(tmp_path))).split()
    assert service["WorkingDirectory"].replace("%h", str(tmp_path)) == str(root)
    environment = {
        "HOME": str(tmp_path),
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=root, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        wait_until(lambda: process.poll() is not None or answers(f"http://127.0.0.1:{port}/{HEALTH[name]}"))
        assert process.poll() is None, (tmp_path / "log").read_text()
        process.send_signal(signal.SIGTERM)
        code = process.wait(float(service.get("TimeoutStopSec", "90")))
    finally:
        stop(process)
    clean = {0, -signal.SIGTERM, *map(int, service.get("SuccessExitStatus", "").split())}
    assert code in clean, (code, (tmp_path / "log").read_text())


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def test_when_a_run_begins_is_stated_once() -> None:
    files = [path for path in DEPLOY.iterdir() if re.search("cron|OnCalendar", path.read_text())]
    assert files == []
    flows = [path for path in (REPOSITORY / "flows").glob("*.py") if re.search(r"\* \* \*", path.read_text())]
    assert flows == []


def test_the_drivers_that_the_addresses_of_databases_ask_for_are_installed() -> None:
    text = "".join(path.read_text() for path in sorted(DEPLOY.iterdir()) if path.is_file())
    addresses = set(re.findall(r"postgresql[+\w]*:///\w+", text))
    assert {make_url(address).database for address in addresses} == {"mlflow", "prefect"}
    for address in addresses:
        make_url(address).get_dialect().import_dbapi()
