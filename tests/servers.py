"""The services of a production set-up, started for tests: PostgreSQL, S3 and MLflow, all on loopback."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from nightshift.project.environment import NO_TELEMETRY
from tests.conftest import REPOSITORY
from tests.ports import free_port

HOST = "127.0.0.1"
_PATIENCE_SECONDS = 120
_POSTGRES_USER = "postgres"


def need(*modules: str) -> None:
    """Skip a test module where what it starts is not installed."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (pip install -e '.[dev]')", allow_module_level=True)


def need_postgres() -> None:
    """Skip a test module where there is no PostgreSQL, or nobody who may run it: it refuses to run as root."""
    if not postgres_programs():
        reason = "PostgreSQL is not installed (apt-get install postgresql)"
        pytest.skip(reason, allow_module_level=True)
    if os.geteuid() == 0 and _POSTGRES_USER not in [entry.pw_name for entry in pwd.getpwall()]:
        pytest.skip(
            f"PostgreSQL refuses to run as root, and there is no user {_POSTGRES_USER}", allow_module_level=True
        )


@contextlib.contextmanager
def running(
    command: list[str], log: Path, environment: Mapping[str, str], user: str | None = None, cwd: Path = Path("/")
) -> Iterator[subprocess.Popen[bytes]]:
    """A server that ends with the block, whatever it has forked with it."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, **environment},
            user=user,
            cwd=cwd,
        )
    try:
        yield process
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server and its children; it may have ended before."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for(process: subprocess.Popen[bytes], ready: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not ready():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def responds(url: str) -> bool:
    """Whether an HTTP server is there; any answer counts, a refusal too."""
    try:
        urllib.request.urlopen(url, timeout=2).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def postgres_programs() -> Path | None:
    """The folder of initdb; Debian's is not on PATH."""
    found = shutil.which("initdb")
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    return Path(found).resolve().parent if found else debian[-1].parent if debian else None


@contextlib.contextmanager
def postgres(password: str, commands: Path) -> Iterator[dict[str, str]]:
    """A cluster in a folder of its own whose user `nightshift` has a password, after the SQL commands in a file;
    yields the variables that name it.

    It refuses to run as root, so that root has Debian's user `postgres` run it.
    """
    programs = postgres_programs()
    assert programs
    user = _POSTGRES_USER if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="postgres-", dir="/tmp"))
    settings = {"PGHOST": HOST, "PGPORT": str(free_port()), "PGUSER": "nightshift", "PGPASSWORD": password}
    try:
        (folder / "password").write_text(password)
        if user:
            shutil.chown(folder, user)
            shutil.chown(folder / "password", user)
        made = ["--username=nightshift", "--auth=scram-sha-256", f"--pwfile={folder}/password", "--no-sync"]
        initdb = [str(programs / "initdb"), *made, "--encoding=UTF8", "--locale=C", str(folder / "data")]
        subprocess.run(initdb, user=user, check=True, capture_output=True, cwd="/")
        options = {"listen_addresses": HOST, "port": settings["PGPORT"], "unix_socket_directories": folder}
        command = [str(programs / "postgres"), "-D", str(folder / "data"), "-c", "fsync=off"]
        command += [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        log = folder / "log"
        with running(command, log, {}, user) as process:
            ready = [str(programs / "pg_isready"), "-q", "-h", HOST, "-p", settings["PGPORT"], "-d", "postgres"]
            wait_for(process, lambda: subprocess.run(ready, check=False).returncode == 0, log)
            create = [str(programs / "psql"), "-q", "-d", "postgres", "-f", str(commands)]
            subprocess.run(create, check=True, env={**os.environ, **settings})
            yield settings
    finally:
        shutil.rmtree(folder)


def postgres_dump(settings: Mapping[str, str], database: str) -> str:
    """All that a database holds, as SQL."""
    programs = postgres_programs()
    assert programs
    command = [str(programs / "pg_dump"), "--no-owner", database]
    done = subprocess.run(command, env={**os.environ, **settings}, check=True, capture_output=True, text=True)
    return done.stdout


@contextlib.contextmanager
def s3(folder: Path) -> Iterator[str]:
    """The address of an S3 service that keeps its objects in memory."""
    port, log = free_port(), folder / "s3.log"
    with running([sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)], log, {}) as process:
        url = f"http://{HOST}:{port}"
        wait_for(process, lambda: responds(f"{url}/moto-api/"), log)
        yield url


@contextlib.contextmanager
def mlflow(log: Path, settings: Mapping[str, str], port: int) -> Iterator[str]:
    """MLflow's server, as deploy/nightshift-mlflow.service starts it."""
    address = ["--host", HOST, "--port", str(port), "--workers", "1"]
    command = [sys.executable, "-m", "mlflow", "server", "--app-name", "basic-auth", *address]
    with running(command, log, {**NO_TELEMETRY, **settings}, cwd=REPOSITORY) as process:
        url = f"http://{HOST}:{port}"
        wait_for(process, lambda: responds(f"{url}/health"), log)
        yield url
