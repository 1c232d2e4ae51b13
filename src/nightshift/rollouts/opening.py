"""Choosing where episodes are played. A machine without Ray plays them in the stage's own process."""

from __future__ import annotations

from nightshift import config
from nightshift.project import packages
from nightshift.rollouts.base import Pool
from nightshift.rollouts.local import LocalPool


def open_pool(workers: int, env: config.Env) -> Pool:
    if not workers:
        return LocalPool(env)
    packages.require("ray", f"machine.workers is {workers}", "set machine.workers: 0 in params.yaml")
    from nightshift.rollouts.pool import RayPool

    return RayPool(workers, env)
