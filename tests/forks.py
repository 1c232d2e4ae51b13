"""Processes that are forked from one that has imported the heavy packages already: they start at once."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

from nightshift.project import environment

STAGES = ("collect", "dataset", "evaluate", "register", "rloo", "rlpd", "sft", "states")
PRELOADED = (
    "torch._dynamo",
    "scipy.stats",
    "av",
    "gymnasium",
    "h5py",
    "hypothesis.stateful",
    "matplotlib.backends.backend_agg",
    "numba",
    "pyarrow.parquet",
    "sqlalchemy.dialects.sqlite",
    "mlflow.data.meta_dataset",
    "mlflow.pyfunc.scoring_server",
    "mlflow.store.db.utils",
    "mlflow.store.model_registry.sqlalchemy_store",
    "mlflow.store.model_registry.sqlalchemy_workspace_store",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.store.tracking.sqlalchemy_workspace_store",
    "mlflow.tracing.processor.base_mlflow",
    "mlflow.tracking",
    "alembic.command",
    "dvc.cachemgr",
    "dvc.cli.parser",
    "dvc.data_cloud",
    "dvc.repo.artifacts",
    "dvc.repo.datasets",
    "dvc.repo.index",
    "dvc.repo.metrics",
    "dvc.repo.params",
    "dvc.repo.plots",
    "dvc.repo.stage",
    "dvc.rwlock",
    "git",
    "networkx",
    "scmrepo.git",
    "prefect.artifacts",
    "prefect.deployments.runner",
    "prefect.events.worker",
    "prefect.flow_engine",
    "prefect.runner",
    "prefect.task_engine",
    "nightshift.cli.app",
    "nightshift.cli.commands",
    "nightshift.adapters.dvc_store",
    "nightshift.adapters.mlflow_registration",
    "nightshift.envs.fake",
    "nightshift.pipeline.precheck",
    *(f"nightshift.stages.{stage}" for stage in STAGES),
    "tests.disk",
    "tests.parsing",
    "tests.schema",
    "tests.lookups",
    "tests.faults.stream_processes",
    "nightshift.learners.data_parallel",
    "nightshift.learners.fsdp",
    "nightshift.rollouts.engine",
    "tests.freezing",
)
SETTINGS = environment.NO_TELEMETRY | environment.SAFE | environment.QUIET
"""Some of the packages read their variables when they are imported."""
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(list(PRELOADED))


def share() -> str:
    """The address of the process that this one forks from, for others to join: its imports take ten seconds of CPU
    time."""
    context()
    return str(_server()._forkserver_address)


def join(address: str) -> None:
    """Fork from the process that another one has started, and that ends with it."""
    server = _server()
    server._forkserver_address = address
    server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # in place of the end of a pipe
    server.ensure_running = vars(forkserver)["ensure_running"] = resource_tracker.ensure_running


def _server() -> Any:
    return vars(forkserver)["_forkserver"]


def context() -> ForkServerContext:
    """For what would spawn processes: these have the variables of the first process that called this, not of this
    one."""
    with contextlib.chdir(Path(__file__).parent.parent), mock.patch.dict(os.environ, SETTINGS):
        forkserver.ensure_running()  # the first call starts the process that all others are forked from
    return _CONTEXT


def fork(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Start `target`, a function that can be imported."""
    process = context().Process(target=target, args=arguments)
    process.start()
    return process


def read_prefect_variables() -> None:
    """Prefect reads them when it is imported, which in a fork was before they were set."""
    from prefect.context import refresh_global_settings_context
    from prefect.logging.configuration import setup_logging

    refresh_global_settings_context()
    setup_logging(incremental=False)
