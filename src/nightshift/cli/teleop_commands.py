"""The command `nightshift teleop`: a person at the controls."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from nightshift import config, envs, files, policies
from nightshift.cli.commands import enter
from nightshift.envs import grid
from nightshift.errors import ConfigError, RegistryError
from nightshift.project import paths, repository
from nightshift.telemetry.console import console

if TYPE_CHECKING:
    from nightshift.access import Access
    from nightshift.teleop.driver import Driver
    from nightshift.teleop.library import Library
    from nightshift.teleop.session import Setup


def teleop(name: str, policy: str, host: str, port: int) -> None:
    """Serve the page until Ctrl-C, then hand what was recorded to DVC."""
    from nightshift import access
    from nightshift.teleop.library import Library
    from nightshift.teleop.robot import marked_by_pilot
    from nightshift.teleop.session import Setup

    token = access.token_of_user()
    access.check_host(host, token)
    root = enter()
    params = config.load(root / paths.PARAMS)
    env = marked_by_pilot(params.env)
    envs.check_cameras(env)
    driver = _driver(root, params, policy) if policy else None
    setup = Setup(env=env, states=params.states, commit=repository.commit(root), driver=driver)
    space = setup.suite.action_space
    library = Library(name, ranges={"actions": (space.low, space.high)})
    if library.lost:
        console.print(library.lost, style="yellow", soft_wrap=True)
    try:
        _serve(setup, library, access.Access(token), host, port)
    except KeyboardInterrupt:
        console.print("stopped")
    finally:
        library.close()
        if library.unsaved:
            console.print(f"an episode was not kept: {library.unsaved}", style="yellow", soft_wrap=True)
    _conclude(root, library)


def _serve(setup: Setup, library: Library, access: Access, host: str, port: int) -> None:
    from nightshift.access import page_url
    from nightshift.teleop.server import open_server

    server = open_server(setup, library, access, (host, port), time.monotonic)
    robot = setup.env.robot
    moved = f"moves the robot at {robot.url}" if robot else "building the simulator takes a while"
    console.print(f"{page_url(host, server.port)}  {moved}; Ctrl-C ends", soft_wrap=True)
    server.run()


def _driver(root: Path, params: config.Params, which: str) -> Driver:
    """A policy from a folder, or from the registry by alias or version."""
    from nightshift.policies.device import resolve
    from nightshift.teleop.driver import Driver

    device = resolve(params.machine.device)
    if (root / which).is_dir():
        files.verify_folder(root / which, f"name the folder of a policy, such as {paths.SFT_POLICY}")
        loaded, version = policies.load(root / which), 0
    else:
        from nightshift.adapters import mlflow_registry, model_versions

        model = params.section("register").model
        try:
            version = int(model_versions.find(root, model, which).version)
            loaded = mlflow_registry.load(root, model, str(version))
        except RegistryError as error:
            raise ConfigError(f"{which} is no folder here, and {error.what}", error.next_step) from None
    if misfit := grid.misfit(params.env, loaded):
        raise ConfigError(f"the policy {which} cannot act here: {misfit}", "change env in params.yaml, or name another")
    return Driver(policy=loaded.to(device), label=which, version=version)


def _conclude(root: Path, library: Library) -> None:
    """What to do with the episodes."""
    for folder, success in ((library.successes, True), (library.failures, False)):
        episodes = [entry for entry in library.entries if entry.success == success]
        if success or episodes:
            new = sum(map(library.is_new, episodes))
            console.print(f"[bold]{folder}[/]: {len(episodes)} episodes, {new} of them new")
    if not library.successes.exists():
        return
    from nightshift.adapters.dvc_store import PATIENCE_SECONDS, DvcStore

    pointer = DvcStore(root, patience=PATIENCE_SECONDS).track(library.successes)
    console.print("to train on them, write in params.yaml under dataset:")
    console.print(Text(f"  sources: [{library.name}]", style="cyan"))
    console.print("to share them with every clone (dvc push, dvc pull):")
    console.print(Text(f"  git add {pointer}", style="cyan"))
