"""docs/production.md, for real: MLflow and Prefect on PostgreSQL, artifacts and data on S3, passwords everywhere."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flows.server import lasting_server
from nightshift.adapters import mlflow_registry, mlflow_tracking
from nightshift.project import paths
from tests import servers
from tests.command import FAILING, Command
from tests.conftest import REPOSITORY, choose, edit, git, make_project, nightshift
from tests.ports import free_port

servers.need("psycopg", "flask_wtf", "dvc_s3", "moto")
servers.need_postgres()

SECRETS = {
    "PGPASSWORD": "s3cret-database",
    "MLFLOW_AUTH_ADMIN_PASSWORD": "s3cret-admin",
    "MLFLOW_FLASK_SERVER_SECRET_KEY": "s3cret-sessions",
    "MLFLOW_TRACKING_PASSWORD": "s3cret-tracking",
    "PREFECT_SERVER_API_AUTH_STRING": "nightshift:s3cret-prefect",
    "AWS_ACCESS_KEY_ID": "s3cret-key-name",
    "AWS_SECRET_ACCESS_KEY": "s3cret-key",
}
"""The blanks of the two files in deploy/."""
BUCKET = "nightshift"
ONE_SENTENCE = 2
"""Lines of an error: what is wrong, and what to do."""


def example(name: str, **changes: str) -> dict[str, str]:
    """The variables of a file in deploy/, with its blanks filled in and other ports."""
    lines = (REPOSITORY / "deploy" / f"{name}.env.example").read_text().splitlines()
    stated = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    blanks = {variable for variable, value in stated.items() if not value}
    assert blanks == stated.keys() & SECRETS.keys(), "exactly the secrets are blank"
    return {variable: changes.get(variable) or value or SECRETS[variable] for variable, value in stated.items()}


@dataclass
class Site:
    """A project, its services, and the variables of its commands."""

    folder: Path
    root: Path
    settings: dict[str, str]
    database: dict[str, str]
    server_settings: dict[str, str]
    """Of MLflow's server."""
    mlflow: ExitStack
    """Its server, while it runs."""
    printed: list[str] = field(default_factory=list)

    def start_mlflow(self) -> str:
        """At the address that its clients know."""
        port = int(self.settings["MLFLOW_TRACKING_URI"].rpartition(":")[2])
        return self.mlflow.enter_context(servers.mlflow(self.folder / "mlflow.log", self.server_settings, port))

    def run(self, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        done = nightshift(self.root, *arguments, **{**self.settings, **changes})
        self.printed.append(done.stdout + done.stderr)
        return done

    def query(self, database: str, sql: str) -> list[tuple[Any, ...]]:
        import psycopg

        at = {"host": "PGHOST", "port": "PGPORT", "user": "PGUSER", "password": "PGPASSWORD"}
        with psycopg.connect(dbname=database, **{name: self.database[key] for name, key in at.items()}) as connection:
            rows: list[tuple[Any, ...]] = connection.execute(sql).fetchall()
        return rows

    def objects(self) -> dict[str, bytes]:
        import boto3

        client = boto3.client("s3", endpoint_url=self.settings["AWS_ENDPOINT_URL"])
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        found = [entry for page in pages for entry in page.get("Contents", [])]
        return {o["Key"]: client.get_object(Bucket=BUCKET, Key=o["Key"])["Body"].read() for o in found}

    def dvc(self, *arguments: str, cwd: Path | None = None) -> None:
        environment = {**os.environ, **self.settings, "DVC_NO_ANALYTICS": "1"}
        command = [sys.executable, "-m", "dvc", *arguments]
        done = subprocess.run(
            command, cwd=cwd or self.root, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def create_account(url: str, name: str, password: str) -> None:
    """As the page does with curl."""
    admin = base64.b64encode(f"admin:{SECRETS['MLFLOW_AUTH_ADMIN_PASSWORD']}".encode()).decode()
    headers = {"Authorization": f"Basic {admin}", "Content-Type": "application/json"}
    body = json.dumps({"username": name, "password": password}).encode()
    urllib.request.urlopen(urllib.request.Request(f"{url}/api/2.0/mlflow/users/create", body, headers)).close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    root = make_project(folder / "project")
    choose(root)
    edit(root, "sft", steps=20)
    edit(root, "evaluate", init_states=2)
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        (root / paths.STATE).mkdir()
        patch.setenv("PREFECT_HOME", str(root / paths.PREFECT_HOME))
        database = stack.enter_context(servers.postgres(SECRETS["PGPASSWORD"], REPOSITORY / "deploy/databases.sql"))
        s3 = stack.enter_context(servers.s3(folder))
        port = free_port()
        changes = {**database, "AWS_ENDPOINT_URL": s3, "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port}"}
        settings = example("nightshift", **changes)
        for name, value in settings.items():
            patch.setenv(name, value)
        mlflow = stack.enter_context(ExitStack())
        site = Site(folder, root, settings, database, example("mlflow", **changes), mlflow)
        make_bucket(site.server_settings)
        create_account(site.start_mlflow(), settings["MLFLOW_TRACKING_USERNAME"], settings["MLFLOW_TRACKING_PASSWORD"])
        yield site


def make_bucket(settings: dict[str, str]) -> None:
    """As the page does."""
    program = [sys.executable, str(REPOSITORY / "deploy/make_bucket.py")]
    subprocess.run(program, env={**os.environ, **settings}, check=True)


@pytest.fixture(scope="module")
def done(site: Site) -> Iterator[Site]:
    """After one run, with the Prefect server that `nightshift serve` starts."""
    with lasting_server(free_port()) as url:
        site.settings["PREFECT_API_URL"] = url
        ran = site.run("run")
        assert ran.returncode == 0, ran.stderr
        yield site


@pytest.mark.slow
def test_a_stage_is_recorded_in_postgresql_and_its_artifacts_go_to_s3_through_the_server(site: Site) -> None:
    ran = site.run("stage", "choose")
    assert ran.returncode == 0, ran.stderr
    named = f"SELECT artifact_location FROM experiments WHERE name = '{mlflow_tracking.EXPERIMENT}'"
    ((location,),) = site.query("mlflow", named)
    assert location.startswith("mlflow-artifacts:"), "clients need no key of the bucket"
    assert set(site.query("mlflow", "SELECT status FROM runs")) == {("FINISHED",)}
    assert [key for key in site.objects() if key.endswith("/artifacts/params.yaml")]


@pytest.mark.slow
def test_a_bucket_that_is_there_stays_as_it_is(site: Site) -> None:
    before = site.objects()
    make_bucket(site.server_settings)
    assert site.objects() == before


@pytest.mark.slow
def test_a_wrong_password_of_mlflow_is_one_sentence(site: Site) -> None:
    refused = site.run("stage", "choose", MLFLOW_TRACKING_PASSWORD="wrong")
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-ONE_SENTENCE:] == [
        f"error: MLflow at {site.settings['MLFLOW_TRACKING_URI']} refuses user and password",
        "  → check MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (docs/production.md), and run again: what "
        "is done is kept",
    ]


@pytest.mark.slow
def test_a_run_is_recorded_in_postgresql_and_its_model_lies_on_s3(done: Site) -> None:
    states = dict(done.query("prefect", "SELECT name, state_name FROM task_run"))
    assert (states["sft"], states["register"]) == ("Completed", "Completed")
    assert done.query("prefect", "SELECT state_name FROM flow_run") == [("Completed",)]
    assert set(done.query("mlflow", "SELECT status FROM runs")) == {("FINISHED",)}
    assert [key for key in done.objects() if key.endswith("/policy.safetensors")]


@pytest.mark.slow
def test_links_to_mlflow_lead_to_its_server(done: Site) -> None:
    artifacts = str(done.query("prefect", "SELECT data FROM artifact"))
    assert f"{done.settings['MLFLOW_TRACKING_URI']}/#/experiments/" in artifacts
    told = done.run("ui")
    assert done.settings["MLFLOW_TRACKING_URI"] in told.stdout


@pytest.mark.slow
def test_the_champion_comes_back_through_the_server(done: Site) -> None:
    policy = mlflow_registry.load(done.root, "nightshift-libero-mini", "1")
    assert policy.action_dim == 7


def kept(root: Path) -> dict[str, bytes]:
    """Results and what names them, by path."""
    names = [paths.DVC_LOCK, paths.SFT_POLICY, paths.DATASET]
    found = [root / name for name in names if (root / name).is_file()]
    found += [path for name in names for path in (root / name).rglob("*") if path.is_file()]
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


WRONG = {
    "Prefect": (
        {"PREFECT_API_AUTH_STRING": "nightshift:wrong"},
        "error: the Prefect server at {PREFECT_API_URL} refuses PREFECT_API_AUTH_STRING",
    ),
    "MLflow": (
        {"MLFLOW_TRACKING_PASSWORD": "wrong"},
        "error: MLflow at {MLFLOW_TRACKING_URI} refuses user and password",
    ),
    "MLflow's database": (
        {"MLFLOW_TRACKING_URI": "postgresql://nightshift:s3cret-database@127.0.0.1/mlflow"},
        "error: MLFLOW_TRACKING_URI names a database, postgresql://127.0.0.1/mlflow, and not a server",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_password_or_address_is_one_sentence_and_loses_nothing(done: Site, what: str) -> None:
    changes, sentence = WRONG[what]
    before = kept(done.root)
    refused = done.run("run", "--force-stage", "sft", **changes)
    assert refused.returncode == 1
    error = refused.stderr.splitlines()[-ONE_SENTENCE:]
    assert error[0] == sentence.format(**done.settings)
    assert error[1].startswith("  → ")
    assert "Traceback" not in refused.stderr
    assert kept(done.root) == before


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["s3", "folder"])
def test_a_clone_gets_all_data_and_models_from_the_remote(done: Site, kind: str, tmp_path: Path) -> None:
    remote = f"s3://{BUCKET}/dvc" if kind == "s3" else str(tmp_path / "remote")
    done.dvc("remote", "add", "-f", "-d", "storage", remote)
    git(done.root, "add", "-f", ".dvc/config", "dvc.lock", "params.yaml")
    git(done.root, "commit", "-q", "--allow-empty", "-m", "remote")
    done.dvc("push")
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(done.root), str(clone))
    done.dvc("pull", "--allow-missing", cwd=clone)
    assert kept(done.root)
    assert kept(clone) == kept(done.root)


@pytest.mark.slow
def test_no_secret_is_in_a_database_a_bucket_a_log_or_the_project_also_after_a_failure(done: Site) -> None:
    address = done.settings["MLFLOW_TRACKING_URI"].replace("//", f"//nightshift:{SECRETS['MLFLOW_TRACKING_PASSWORD']}@")
    settings = {**done.settings, "MLFLOW_TRACKING_URI": address}
    command = Command(done.root, "run", "--force-stage", "sft", program=FAILING, **settings)
    failed = command.wait()
    assert "error: the dataset is damaged" in failed.stderr
    done.printed.append(failed.stdout + failed.stderr)
    texts = {f"database {name}": servers.postgres_dump(done.database, name).encode() for name in ("mlflow", "prefect")}
    texts |= {f"s3://{BUCKET}/{key}": content for key, content in done.objects().items()}
    texts |= {str(path): path.read_bytes() for path in done.folder.rglob("*") if path.is_file()}
    texts |= {f"output {number}": text.encode() for number, text in enumerate(done.printed)}
    # Signed addresses of the S3 service's clients name the key, which is no secret.
    del texts[str(done.folder / "s3.log")]
    secrets = [value.rpartition(":")[2].encode() for name, value in SECRETS.items() if name != "AWS_ACCESS_KEY_ID"]
    assert [(secret, name) for name, text in texts.items() for secret in secrets if secret in text] == []


@pytest.mark.slow
def test_a_run_that_finds_mlflow_gone_says_so_and_the_next_one_goes_on(done: Site) -> None:
    done.mlflow.close()
    before = kept(done.root)
    try:
        refused = done.run("run", "--force-stage", "sft", MLFLOW_HTTP_REQUEST_MAX_RETRIES="1")
    finally:
        done.start_mlflow()
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-ONE_SENTENCE] == (
        f"error: MLflow at {done.settings['MLFLOW_TRACKING_URI']} does not answer"
    )
    assert kept(done.root) == before
    again = done.run("run", "--force-stage", "sft")
    assert again.returncode == 0, again.stderr
    assert "▶ sft" in again.stdout
    assert "▶ dataset" not in again.stdout, "what was done before is kept"
    assert kept(done.root).items() >= before.items(), "the same dataset, and the same weights where there were some"
    assert ("RUNNING",) not in done.query("mlflow", "SELECT status FROM runs")
