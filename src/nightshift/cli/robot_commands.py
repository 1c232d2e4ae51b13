"""The commands `nightshift robot …`: serve a simulator as a robot, check a server, stop and free a robot."""

from __future__ import annotations

import http.client
import os
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import yaml
from rich.text import Text

from nightshift import config
from nightshift.cli.commands import enter
from nightshift.envs.robot.client import TOKEN_VARIABLE, fetch_description
from nightshift.envs.robot.messages import Description
from nightshift.envs.robot.people import FolderPerson
from nightshift.errors import ConfigError, SimulatorError
from nightshift.project import paths
from nightshift.robot_server.conformance import Result, run_checks
from nightshift.robot_server.probe import Probe
from nightshift.telemetry.console import console

_TIMEOUT_S = 10.0


def serve(suite: str, tasks: list[str], address: tuple[str, int], watchdog_s: float) -> None:
    """Until interrupted. Cameras and protocol are those of params.yaml."""
    from nightshift.robot_server import app
    from nightshift.robot_server.controller import Controller
    from nightshift.robot_server.simulated import SimulatedArm

    root = enter()
    token = os.environ.get(TOKEN_VARIABLE, "")
    app.check_address(*address, token)
    chosen = config.load(root / paths.PARAMS).env
    env = chosen.model_copy(update={"suite": suite, "tasks": tuple(tasks), "robot": None})
    with ThreadPoolExecutor(1) as thread:
        arm = thread.submit(SimulatedArm, env, watchdog_s=watchdog_s).result()
        url = f"http://{address[0]}:{address[1]}"
        console.print(f"{arm.description.name} is a robot at {url}; in params.yaml of the client:\n")
        console.print(Text(snippet(url, arm.description)), soft_wrap=True)
        app.serve(Controller(arm, token=token), thread, watchdog_s, address)


def check(url: str, *, move: bool) -> None:
    """Every check, and what a server does wrong; SimulatorError if it does."""
    _check_url(url)
    results = []
    for result in run_checks(Probe(url, _TIMEOUT_S), move=move):
        results.append(result)
        _print(result)
    failed = [result.name for result in results if not result.passed]
    if failed:
        raise SimulatorError(
            f"{url} fails {len(failed)} of {len(results)} checks: {', '.join(failed)}",
            "docs/robot_protocol.md says what each endpoint has to do",
        )
    not_moved = "" if move else "; those that move the robot were left out: --move"
    console.print(f"\n{url} passes {len(results)} checks{not_moved}. For params.yaml:\n")
    console.print(Text(snippet(url, fetch_description(url, _TIMEOUT_S))), soft_wrap=True)


def stop(url: str) -> None:
    """By a person: the robot stays stopped until it is released."""
    _post(url, "stop", b'{"reason":"a person said so","latched":true}')
    console.print("stopped; nightshift robot release frees it")


def release(url: str) -> None:
    _post(url, "release", b"{}")
    console.print("released: the next session may clear the error and move it")


def answer(word: str) -> None:
    """To what the run asks a person."""
    if word not in ("yes", "no"):
        raise ConfigError(f"{word!r} is no answer", "answer yes or no")
    enter()
    person = FolderPerson()
    asked = person.question()
    person.reply(word == "yes")
    if asked is not None:
        console.print(Text(f"{asked['words']} {word}"), soft_wrap=True)


def snippet(url: str, described: Description) -> str:
    """The section env of params.yaml for a server, with its own limits to be narrowed."""
    limits = described.limits
    scale = described.action_scale or (0.02, 0.1)
    robot = {
        "url": url,
        "description": described.digest,
        "scale": {"position": scale[0], "rotation": scale[1]},
        "limits": {
            "box_low": list(limits.box_low),
            "box_high": list(limits.box_high),
            **{
                name: getattr(limits, name) for name in ("max_turn", "linear_speed", "angular_speed", "force", "torque")
            },
        },
        "deadline_s": min(described.command_age_s, described.watchdog_s) / 2,
        "attempts": 2,
        "reset_deadline_s": 60.0,
        "image_age_s": 0.2,
        "reset": "script" if "init_states" in described.capabilities else "person",
        "success": "server" if "success" in described.capabilities else "person",
        "answer_within_s": 600.0,
    }
    section = {"suite": "robot", "tasks": [task.name for task in described.tasks], "robot": robot}
    return yaml.safe_dump({"env": section}, sort_keys=False, default_flow_style=None)


def _print(result: Result) -> None:
    mark, style = ("✔", "green") if result.passed else ("✘", "bold red")
    console.print(Text.assemble((mark, style), f" {result.name}: {result.about}"), soft_wrap=True)
    if not result.passed:
        for label, words in (("sent", result.sent), ("expected", result.expected), ("came", result.came)):
            console.print(Text(f"    {label:<9}{words}"), soft_wrap=True)


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is no address of a robot server", "give http://HOST:PORT")


def _post(url: str, endpoint: str, body: bytes) -> None:
    _check_url(url)
    try:
        status, data = Probe(url, _TIMEOUT_S).post(endpoint, body)
    except (OSError, http.client.HTTPException) as error:
        raise SimulatorError(
            f"no robot server answers at {url}: {error!r}", "press the robot's own stop button if it moves"
        ) from error
    if status != http.client.OK:
        raise SimulatorError(f"{url} refuses /{endpoint}: {data[:200]!r}", "press the robot's own stop button")
