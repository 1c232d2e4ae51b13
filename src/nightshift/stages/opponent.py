"""Take the champion from the registry as one more policy of the evaluation, if this code has not played it there yet.

The registry is outside DVC's graph. What is taken from it is an output here, so the champion is in the key of
`evaluate` by its weights. A champion with which this code has played the grid is not needed: its outcomes are in the
registry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nightshift import config
from nightshift.envs.grid import cameras_in, digest, misfit, played_by
from nightshift.errors import DataError, PluginError
from nightshift.pipeline.job import Job
from nightshift.project import paths
from nightshift.stages import _champion
from nightshift.telemetry.console import console

if TYPE_CHECKING:
    from nightshift.adapters.mlflow_registry import Champion


def run(job: Job, *, env: config.Env, policy: config.Policy, evaluate: config.Evaluate, register_model: str) -> None:
    champion, cameras = _champion.find(register_model), cameras_in(env, policy.inputs)
    if champion is None or champion.has_played(digest(env, evaluate, cameras), played_by(env)):
        _champion.leave(paths.OPPONENT, None)
    elif why := _why_not(champion, env, cameras):
        console.print(f"version {champion.version}, the champion, cannot play this grid: {why}", markup=False)
        _champion.leave_out(paths.OPPONENT, champion, why)
    else:
        _champion.leave(paths.OPPONENT, champion)


def _why_not(champion: Champion, env: config.Env, cameras: Sequence[str]) -> str:
    """Why it cannot play where candidates see these cameras; empty if it can."""
    try:
        policy = champion.policy()
    except (DataError, PluginError) as error:  # a night's training must not be lost to an old champion
        return error.what  # its files are those that were registered: damage is a RegistryError
    unseen = [camera for camera in cameras_in(env, list(policy.shapes)) if camera not in cameras]
    return f"it sees {unseen[0]}, which no candidate does" if unseen else misfit(env, policy)
