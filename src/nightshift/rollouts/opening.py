"""Choosing where episodes are played: in the stage's own process, or in others, on Ray where it is installed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nightshift import config, envs
from nightshift.interventions.base import PageSettings
from nightshift.policies.device import resolve
from nightshift.project import packages
from nightshift.rollouts.base import Pool
from nightshift.rollouts.engine import EngineSettings
from nightshift.rollouts.local import LocalPool
from nightshift.types import RolloutRequest


def open_pool(machine: config.Machine, env: config.Env, device: torch.device) -> Pool:
    """`device`: what machine.device resolves to (policies/device.py)."""
    settings = engine_settings(machine, device)
    if not machine.workers or not packages.is_installed("ray"):
        return LocalPool(env, settings, workers=machine.workers)
    from nightshift.rollouts.pool import RayPool

    return RayPool(machine.workers, env, settings)


def open_pool_for(requests: Sequence[RolloutRequest], machine: config.Machine, env: config.Env) -> Pool:
    """With no more workers than there are requests. For commands that are no stage: no precheck has seen `machine`."""
    envs.selected(env).check_machine(machine)
    enough = machine.model_copy(update={"workers": min(machine.workers, len(requests))})
    return open_pool(enough, env, resolve(machine.device))


def engine_settings(machine: config.Machine, device: torch.device) -> EngineSettings:
    return EngineSettings(
        device=device,
        threads=machine.threads,
        requests_at_once=machine.requests_at_once,
        compile=machine.compile,
        page=PageSettings(address=machine.page_address, patience_s=machine.page_patience_s),
        reserved_gpus=machine.ranks if machine.placement == "apart" else 0,
    )
