"""Settings of the tools we stand on. Everything local, quiet and without telemetry unless the user says otherwise."""

from __future__ import annotations

import os
import re
from pathlib import Path

from nightshift.project import paths

TRACKING_URI = "MLFLOW_TRACKING_URI"
_LOCAL_PAGES = "http://127.0.0.1:5000"
"""Where `nightshift ui` shows MLflow unless told otherwise."""
SERVER_PASSWORD, CLIENT_PASSWORD = "PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING"

NO_TELEMETRY = {
    "DO_NOT_TRACK": "true",  # MLflow accepts this spelling only; Prefect's client accepts it too
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DVC_NO_ANALYTICS": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
}

SAFE = {
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "90",  # the default of 20 is short for a busy two-core machine
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray gives its workers niceness 15: beside any other load on the machine a run takes three times as long.
    "RAY_worker_niceness": "0",
    # A server that does not answer is given up after seconds; by default after minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # it prints its server's address with the password in it
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # a 237 MB side process that nothing here uses
}

QUIET = {
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "ALEMBIC_LOGGING_LEVEL": "ERROR",
    "PREFECT_CLI_COLORS": "true",
    "RAY_DEDUP_LOGS": "1",
}

OWN_PREFECT = {
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
}
"""For `nightshift run`, which shows its own progress; Prefect's log lines still reach its database and its pages."""


def apply(root: Path, *, own_prefect: bool = False) -> None:
    """Set what is not set yet. Call it before prefect, mlflow, dvc or ray are imported."""
    root = root.resolve()
    local = {
        TRACKING_URI: f"sqlite:///{root / paths.MLFLOW_DATABASE}",
        "PREFECT_HOME": str(root / paths.PREFECT_HOME),
        "MPLCONFIGDIR": str(root / paths.STATE / "matplotlib"),
    }
    settings = NO_TELEMETRY | SAFE | QUIET | local | (OWN_PREFECT if own_prefect else {})
    if SERVER_PASSWORD in os.environ:  # of a server that is started here, whose client this process is
        settings[CLIENT_PASSWORD] = os.environ[SERVER_PASSWORD]
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def mlflow_pages() -> str:
    """Where a browser finds MLflow: at its server, or where `nightshift ui` shows a store in the project."""
    uri = os.environ.get(TRACKING_URI, "")
    return without_password(uri).rstrip("/") if uri.startswith("http") else _LOCAL_PAGES


def without_password(uri: str) -> str:
    """An address that can be shown: without user, password and query, in whichever of them the secret is.

    Example: without_password("http://me:secret@host:5000/path?key=secret") == "http://host:5000/path"
    """
    return re.sub(r"\?.*$", "", re.sub(r"//.*@", "//", uri))
